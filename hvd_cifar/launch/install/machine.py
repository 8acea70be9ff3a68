"""The machine's compiler, MPI, CUDA and NCCL. Each function finds one of them, or says what is missing."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError

# Instructions with which Horovod adds half-precision numbers.
VECTOR_FLAGS = ("f16c", "avx", "fma")
CUDA_HOMES = ("/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr/lib/nvidia-cuda-toolkit")
NCCL_HOMES = ("/usr", "/usr/local", "/usr/local/cuda", "/usr/local/nccl", "/opt/nccl")
LIBRARY_FOLDERS = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "targets/x86_64-linux/lib")

CUDA_PROBE = "#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n__global__ void probe(__half *x) { *x = *x; }\n"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. `version` is the first line of its --version."""

    path: str
    version: str


@dataclass(frozen=True)
class SystemMpi:
    """The machine's own Open MPI. `version` is like "4.1.4"."""

    mpicc: Path
    version: str


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit that compiles. `version` is of nvcc, like "12.9"."""

    home: Path
    version: str


@dataclass(frozen=True)
class Nccl:
    """The folder of NCCL's header, and its shared library. `version` is of the header, like "2.27.7"."""

    include: Path
    library: Path
    version: str


@dataclass(frozen=True)
class Machine:
    """What set-up builds with and for. `vector_flags` are for the compiler, like "-mavx -mfma"."""

    compiler: Compiler
    vector_flags: str = ""
    system_mpi: SystemMpi | None = None  # None: the packaged one
    cuda: Cuda | None = None  # None: for the CPU


def look_around(environ: Mapping[str, str], gpu: bool, system_mpi: bool) -> Machine:
    """Find all that set-up needs, before it downloads or builds anything. Raises UserError for what is missing."""
    if gpu:
        check_nccl_home(environ)
    return Machine(
        compiler=find_compiler(environ),
        vector_flags=vector_flags(Path("/proc/cpuinfo").read_text(errors="replace")),
        system_mpi=find_system_mpi(environ) if system_mpi else None,
        cuda=find_cuda(environ) if gpu else None,
    )


def find_compiler(environ: Mapping[str, str]) -> Compiler:
    """The C++ compiler: $CXX, else c++, g++ or clang++. Raises UserError where it or `make` is missing."""
    path = environ.get("PATH")
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((compiler for name in names if (compiler := shutil.which(name, path=path))), None)
    make = shutil.which("make", path=path)
    if found and make:
        return Compiler(found, _output([found, "--version"]).partition("\n")[0])
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


def find_cuda(environ: Mapping[str, str], homes: tuple[str, ...] = CUDA_HOMES) -> Cuda:
    """The CUDA toolkit with nvcc: $HOROVOD_CUDA_HOME, $CUDA_HOME, $CUDA_PATH, PATH, then the usual places.

    It compiles a one-line kernel: a toolkit without headers, or one that rejects the machine's compiler, would
    otherwise fail only during Horovod's build. Raises UserError.
    """
    named = [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    candidates = [Path(home, "bin", "nvcc") for home in named]
    candidates += [Path(on_path).resolve()] if on_path else []
    candidates += [Path(home, "bin", "nvcc") for home in homes]
    nvcc = next((path for path in candidates if os.access(path, os.X_OK)), None)
    if nvcc is None:
        raise UserError(
            "--gpu: no nvcc (looked in CUDA_HOME, PATH and "
            f"{', '.join(homes)}); install the CUDA toolkit 12 or load its module, or set CUDA_HOME to where it is"
        )
    version = re.search(r"release (\d+\.\d+)", _output([str(nvcc), "--version"]))
    command = [str(nvcc), "-x", "cu", "-c", "-o", os.devnull, "-"]
    probe = subprocess.run(command, input=CUDA_PROBE, capture_output=True, text=True, env=dict(environ))
    if probe.returncode or not version:
        lines = (probe.stderr or probe.stdout).strip().splitlines()
        telling = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
        raise UserError(
            f"--gpu: {nvcc} cannot compile a kernel ({telling.strip()}); install the whole CUDA toolkit, headers too"
        )
    return Cuda(_toolkit_of(nvcc, environ), version[1])


def _toolkit_of(nvcc: Path, environ: Mapping[str, str]) -> Path:
    """The toolkit's root, from nvcc itself: the nvcc on PATH may be a script that calls another one."""
    command = [str(nvcc), "--dryrun", "-x", "cu", "-c", "-o", os.devnull, os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, env=dict(environ))
    top = re.search(r"(?m)^#\$ TOP=(.+)$", said.stdout + said.stderr)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


def check_nccl_home(environ: Mapping[str, str]) -> None:
    """Raise UserError where $HOROVOD_NCCL_HOME holds no NCCL.

    Without that variable nothing needs to be checked: tensorflow[and-cuda] brings NCCL's header and library.
    """
    home = environ.get("HOROVOD_NCCL_HOME")
    if home and not _nccl_in(Path(home)):
        raise UserError(
            f"--gpu: HOROVOD_NCCL_HOME={home} has no include/nccl.h with lib/libnccl.so; name the folder that holds "
            "both, or unset it to use the NCCL that TensorFlow brings"
        )


def find_nccl(environ: Mapping[str, str], packages: Path, homes: tuple[str, ...] = NCCL_HOMES) -> Nccl:
    """NCCL in $HOROVOD_NCCL_HOME; without that, in TensorFlow's NCCL package, else in the machine's folders.

    `packages`: the environment's site-packages. Raises UserError where there is no NCCL.
    """
    check_nccl_home(environ)
    named = environ.get("HOROVOD_NCCL_HOME")
    for home in [Path(named)] if named else [packages / "nvidia" / "nccl", *map(Path, homes)]:
        nccl = _nccl_in(home)
        if nccl:
            return nccl
    raise UserError(
        "--gpu: no NCCL header (nccl.h) with library (libnccl.so); install NCCL's development package "
        "(Debian, Ubuntu: apt-get install libnccl-dev), or set HOROVOD_NCCL_HOME to where include/ and lib/ are"
    )


def _nccl_in(home: Path) -> Nccl | None:
    header = home / "include" / "nccl.h"
    # The package has only libnccl.so.2, not the plain name that a linker looks for.
    names = [home / folder / name for folder in LIBRARY_FOLDERS for name in ("libnccl.so", "libnccl.so.2")]
    library = next((path for path in names if path.exists()), None)
    if library is None or not header.exists():
        return None
    text = header.read_text(errors="replace")
    defined = dict(re.findall(r"(?m)^\s*#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    version = ".".join(defined.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    return Nccl(header.parent, library, version)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout or done.stderr).strip()
