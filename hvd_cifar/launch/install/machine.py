"""Finds the machine's compiler, or says what is missing."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError

# Instruction sets with which Horovod adds half-precision numbers.
VECTOR_FLAGS = ("f16c", "avx", "fma")


@dataclass(frozen=True)
class Machine:
    """What set-up builds with and for."""

    compiler: tuple[str, str]  # path of the C++ compiler, and the first line of its --version
    vector_flags: str = ""  # for the compiler, such as "-mavx -mfma"
    gpu: bool = False  # whether set-up is for GPUs, which need not be here


def look_around(gpu: bool) -> Machine:
    """Find everything that set-up needs, before it downloads or builds. Raises UserError for what is missing."""
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
    flags = " ".join(f"-m{flag}" for flag in VECTOR_FLAGS if re.search(rf"(?m)^flags\s*:.*\b{flag}\b", cpuinfo))
    return Machine(find_compiler(), flags, gpu)


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
    said = subprocess.run([found, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return found, (said.stdout or said.stderr).strip().partition("\n")[0]
