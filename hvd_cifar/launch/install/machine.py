"""Finds the machine's compiler and NVIDIA driver, or says what is missing."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError

# Instruction sets with which Horovod adds half-precision numbers.
VECTOR_FLAGS = ("f16c", "avx", "fma")
# Required by CUDA 12's libraries, and by the PTX of cuda_kernels.py.
OLDEST_DRIVER, OLDEST_GPU = 525, 6.0
NEEDS = f"training on GPUs needs driver {OLDEST_DRIVER} or later and a GPU from Pascal ({OLDEST_GPU}) on"


@dataclass(frozen=True)
class Machine:
    """What set-up builds with and for."""

    compiler: tuple[str, str]  # path of the C++ compiler, and the first line of its --version
    vector_flags: str = ""  # for the compiler, such as "-mavx -mfma"
    gpu: str = ""  # driver and GPUs, in words; empty: set-up for the CPU


def look_around(gpu: bool) -> Machine:
    """Find everything that set-up needs, before it downloads or builds. Raises UserError for what is missing."""
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
    flags = " ".join(f"-m{flag}" for flag in VECTOR_FLAGS if re.search(rf"(?m)^flags\s*:.*\b{flag}\b", cpuinfo))
    return Machine(find_compiler(), flags, check_driver() if gpu else "")


def find_compiler() -> tuple[str, str]:
    """`Machine.compiler`: $CXX, else c++, g++ or clang++. Raises UserError where it or `make` is missing."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    missing = [] if found else [f"a C++ compiler ({', '.join(names)})"]
    missing += [] if shutil.which("make") else ["make"]
    if not found or missing:
        raise UserError(
            f"{' and '.join(missing)} not found, needed to build Horovod; install build tools "
            "(Debian, Ubuntu: apt-get install g++ make; Fedora: dnf install gcc-c++ make)"
        )
    return found, _output([found, "--version"]).partition("\n")[0]


def check_driver() -> str:
    """The machine's NVIDIA driver and GPUs, in words.

    Raises UserError where the driver or every GPU is too old. A missing driver is no error: images are built without
    one.
    """
    program = shutil.which("nvidia-smi")
    query = "--query-gpu=driver_version,compute_cap,name"
    said = _output([program, query, "--format=csv,noheader"]) if program else ""
    gpus = re.findall(r"(?m)^([\d.]+), (\d+\.\d+), (.+)$", said)
    if not gpus:
        return f"NVIDIA driver: {'nvidia-smi lists no GPU' if program else 'no nvidia-smi'} here; {NEEDS}"
    driver, newest = gpus[0][0], max(float(capability) for _, capability, _ in gpus)
    names = ", ".join(sorted({f"{name} ({capability})" for _, capability, name in gpus}))
    if newest < OLDEST_GPU or int(driver.partition(".")[0]) < OLDEST_DRIVER:
        raise UserError(f"--gpu: driver {driver}, {names}; {NEEDS}")
    return f"NVIDIA driver {driver}, {len(gpus)} GPU{'s' * (len(gpus) > 1)}: {names}"


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout or done.stderr).strip()


if __name__ == "__main__":  # on other hosts, before they are used
    try:
        check_driver()
    except UserError as error:
        sys.exit(str(error))
