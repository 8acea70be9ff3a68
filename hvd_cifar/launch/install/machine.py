"""Finds the machine's compiler, MPI and NVIDIA driver, or says what is missing."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError

# Instruction sets with which Horovod adds half-precision numbers.
VECTOR_FLAGS = ("f16c", "avx", "fma")
# Required by CUDA 12's libraries, and by the PTX of cuda_kernels.py.
OLDEST_DRIVER, OLDEST_GPU = 525, 6.0
NEEDS = f"training on GPUs needs driver {OLDEST_DRIVER} or later and a GPU from Pascal ({OLDEST_GPU}) on"


@dataclass(frozen=True)
class SystemMpi:
    """The machine's own Open MPI. `version` is like "4.1.4"."""

    mpicc: Path
    version: str


@dataclass(frozen=True)
class Machine:
    """What set-up builds with and for.

    compiler: path of the C++ compiler, and the first line of its --version.
    vector_flags: compiler flags such as "-mavx -mfma".
    """

    compiler: tuple[str, str]
    vector_flags: str = ""
    system_mpi: SystemMpi | None = None  # None: the packaged one
    gpu: str = ""  # driver and GPUs, in words; empty: set-up for the CPU


def look_around(environ: Mapping[str, str], gpu: bool, system_mpi: bool) -> Machine:
    """Find everything that set-up needs, before it downloads or builds. Raises UserError for what is missing."""
    return Machine(
        compiler=find_compiler(environ),
        vector_flags=vector_flags(Path("/proc/cpuinfo").read_text(errors="replace")),
        system_mpi=find_system_mpi(environ) if system_mpi else None,
        gpu=check_driver(environ) if gpu else "",
    )


def find_compiler(environ: Mapping[str, str]) -> tuple[str, str]:
    """`Machine.compiler`: $CXX, else c++, g++ or clang++. Raises UserError where it or `make` is missing."""
    path = environ.get("PATH")
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((compiler for name in names if (compiler := shutil.which(name, path=path))), None)
    make = shutil.which("make", path=path)
    if found and make:
        return found, _output([found, "--version"]).partition("\n")[0]
    missing = [] if found else [f"a C++ compiler ({', '.join(names)})"]
    missing += [] if make else ["make"]
    raise UserError(
        f"{' and '.join(missing)} not found, needed to build Horovod; install build tools "
        "(Debian, Ubuntu: apt-get install g++ make; Fedora: dnf install gcc-c++ make)"
    )


def vector_flags(cpuinfo: str) -> str:
    """Compiler flags for the vector instructions that Horovod can use, from the text of /proc/cpuinfo."""
    flags = re.search(r"(?m)^flags\s*:(.*)$", cpuinfo)
    have = set(flags[1].split()) if flags else set()
    return " ".join(f"-m{flag}" for flag in VECTOR_FLAGS if flag in have)


def find_system_mpi(environ: Mapping[str, str]) -> SystemMpi:
    """The Open MPI whose mpicc and mpirun are on PATH. Raises UserError where it is missing or not version 4."""
    tools = {name: shutil.which(name, path=environ.get("PATH")) for name in ("mpicc", "mpicxx", "mpirun")}
    missing = [name for name, path in tools.items() if not path]
    if missing:
        raise UserError(
            f"--system-mpi: {', '.join(missing)} not on PATH; install Open MPI 4 with its headers (Debian, Ubuntu: "
            "apt-get install openmpi-bin libopenmpi-dev), load its module, or leave --system-mpi out"
        )
    said = _output([str(tools["mpirun"]), "--version"])
    version = re.search(r"\(Open MPI\) (\d+)\.(\S+)", said)
    if not version or version[1] != "4":
        first = said.partition("\n")[0] or "nothing"
        raise UserError(
            f"--system-mpi: {tools['mpirun']} --version says '{first}', but Horovod's launcher works with Open MPI 4 "
            "only; put its mpirun first on PATH, or leave --system-mpi out"
        )
    return SystemMpi(Path(str(tools["mpicc"])).resolve(), f"{version[1]}.{version[2]}")


def check_driver(environ: Mapping[str, str]) -> str:
    """The machine's NVIDIA driver and GPUs, in words.

    Raises UserError where the driver or every GPU is too old. A missing driver is no error: images are built without
    one.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    query = "--query-gpu=driver_version,compute_cap,name"
    said = _output([program, query, "--format=csv,noheader"]) if program else ""
    gpus = re.findall(r"(?m)^([\d.]+), (\d+\.\d+), (.+)$", said)
    if "compute_cap" in said:  # drivers before 510 do not know this field
        raise UserError(f"--gpu: this driver is too old; {NEEDS}")
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
        check_driver(os.environ)
    except UserError as error:
        sys.exit(str(error))
