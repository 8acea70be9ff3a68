"""Compile the project's convolutions (hvd_cifar/kernels/native) for an environment's TensorFlow.

The library is cached per user beside Horovod's wheels, under a hash of everything that it is built from.
"""

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvd_cifar.launch.install import horovod
from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.steps import StepFailed, Steps, say

SOURCES = Path(__file__).parents[2] / "kernels" / "native"
LIBRARY = Path("lib", "hvd_cifar", "libconvolutions.so")  # within the environment; kernels/compiled.py looks there

OPTIONS = ["-std=c++17", "-fPIC", "-DNDEBUG"]
# These keep the arithmetic of NaN and infinities. They only drop errno and floating-point exceptions.
QUICK = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
# One object file per instruction set; op.cc chooses at run time. Tile sizes follow the number of vector registers: 32,
# or 16 with AVX2.
WIDE = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512", "-DLANES=16"]
SETS = {
    "avx512": ["winograd.cc", *WIDE, "-DMANY_TILES=8", "-DMANY_CHANNELS=8"],
    "avx2": ["winograd.cc", "-mavx2", "-mfma", "-DLANES=8", "-DMANY_TILES=4", "-DMANY_CHANNELS=4"],
    "avx512_bf16": ["dots.cc", *WIDE, "-mavx512bf16"],
}


def compile_into(steps: Steps, venv: Path, described: Mapping[str, str], machine: Machine) -> None:
    """Put the library into an environment, from the cache or compiled.

    If that fails, print a note and leave no library: TensorFlow's convolutions take its place.

    `described`: the output of `installer.DESCRIBE`.
    """
    library = venv / LIBRARY
    library.unlink(missing_ok=True)
    if platform.machine() != "x86_64":
        return
    key = horovod.key(ingredients(described["tensorflow"], machine))
    kept = horovod.cache_folder(os.environ, otherwise=venv / "wheels") / f"convolutions-{key}.so"
    if kept.is_file():
        with steps.step("convolutions, compiled before"):
            _copy(kept, library)
        return
    tensorflow = Path(described["packages"]) / "tensorflow"
    try:
        with steps.step("convolutions"), tempfile.TemporaryDirectory(prefix="hvd_cifar-") as work:
            built = _compile(steps, machine.compiler.path, tensorflow, Path(work))
            _copy(built, library)
            with contextlib.suppress(OSError):  # the next checkout compiles it again
                _copy(built, kept)
    except StepFailed as error:
        say(f"    {error}, see the log; training will use TensorFlow's convolutions, which are slower for ResNets")


def ingredients(tensorflow: str, machine: Machine) -> dict[str, object]:
    """Everything that the library depends on. `tensorflow`: package and version."""
    return {
        "sources": [path.read_text() for path in [*sorted(SOURCES.glob("*.cc")), *sorted(SOURCES.glob("*.h"))]],
        "commands": Path(__file__).read_text(),
        "tensorflow": tensorflow,
        "compiler": f"{machine.compiler.path} {machine.compiler.version}",
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
    }


def _copy(source: Path, target: Path) -> None:
    """Copy a file in one step, for readers of the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # of its own: others may write the same target
        shutil.copyfile(source, Path(folder, "partial")).replace(target)


def _compile(steps: Steps, compiler: str, tensorflow: Path, work: Path) -> Path:
    objects = []
    for name, (source, *options) in SETS.items():
        objects.append(str(work / f"{name}.o"))
        there = str(SOURCES / source)
        steps.run([compiler, *OPTIONS, *QUICK, *options, f"-DSET={name}", "-c", there, "-o", objects[-1]])
    # -w: TensorFlow's headers give warnings.
    objects.append(str(work / "op.o"))
    headers = ["-w", "-isystem", str(tensorflow / "include")]
    steps.run([compiler, *OPTIONS, "-O2", *headers, "-c", str(SOURCES / "op.cc"), "-o", objects[-1]])
    linked = ["-L", str(tensorflow), "-l:libtensorflow_framework.so.2"]
    steps.run([compiler, "-shared", *objects, "-o", str(work / LIBRARY.name), *linked])
    return work / LIBRARY.name
