"""Compile the project's convolutions (hvd_cifar/kernels/native) for an environment's TensorFlow."""

import os
import platform
import shutil
from pathlib import Path

from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.steps import Environment, StepFailed, Steps, built, say

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


def compile_into(steps: Steps, venv: Path, environment: Environment, machine: Machine) -> None:
    """Put the library into an environment, from the cache or compiled.

    If that fails, print a note and leave no library: TensorFlow's convolutions take its place.
    """
    library = venv / LIBRARY
    library.unlink(missing_ok=True)
    if platform.machine() != "x86_64":
        return
    compiler, tensorflow = machine.compiler[0], environment.folder / "tensorflow"
    made_of = {
        "sources": [path.read_text() for path in [*sorted(SOURCES.glob("*.cc")), *sorted(SOURCES.glob("*.h"))]],
        "commands": Path(__file__).read_text(),
        "tensorflow": environment.tensorflow,
        "compiler": machine.compiler,
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
    }

    def build(work: Path) -> Path:
        objects = [str(work / f"{name}.o") for name in (*SETS, "op")]
        for (name, (source, *options)), made in zip(SETS.items(), objects, strict=False):
            there = str(SOURCES / source)
            steps.run([compiler, *OPTIONS, *QUICK, *options, f"-DSET={name}", "-c", there, "-o", made])
        headers = ["-w", "-isystem", str(tensorflow / "include")]  # -w: they give warnings
        steps.run([compiler, *OPTIONS, "-O2", *headers, "-c", str(SOURCES / "op.cc"), "-o", objects[-1]])
        linked = ["-L", str(tensorflow), "-l:libtensorflow_framework.so.2"]
        steps.run([compiler, "-shared", *objects, "-o", str(work / LIBRARY.name), *linked])
        return work / LIBRARY.name

    try:
        found = built(steps, ("convolutions, compiled before", "convolutions"), made_of, build)
    except StepFailed as error:
        say(f"    {error}, see the log; training will use TensorFlow's convolutions, which are slower for ResNets")
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found, library)
