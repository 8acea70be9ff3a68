"""An environment for GPUs, set up and checked without one: what it loads, its kernels, and its path with a made-up GPU.

Too slow for every run (marked so), 6 GB, and needs a package index: `./run.sh test -m slow tests/launch/test_gpu.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvd_cifar.launch.install import cuda_kernels, everywhere, horovod
from hvd_cifar.launch.install.steps import Steps, locked
from tests.ranks import CHECKOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
SANITY = "import tensorflow as tf, horovod.tensorflow as hvd; assert hvd.nccl_built() and hvd.cuda_built()"
# Pascal to Blackwell: what the packages' ptxas knows.
ARCHITECTURES = (60, 70, 75, 80, 86, 89, 90, 100, 120)
CALLS = 7 * 4 * 3 + 3 * 2 + 2 * 3 + 1  # collectives of fake_gpu.cc, without a broadcast from each rank


@dataclass(frozen=True)
class Environment:
    """A checkout that is set up for GPUs."""

    checkout: Path
    said: str

    @property
    def venv(self) -> Path:
        """Its environment."""
        return self.checkout / ".venv"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return next(self.venv.glob("lib/python3*/site-packages"))

    @property
    def library(self) -> Path:
        """Horovod's library."""
        return next(self.packages.glob("horovod/tensorflow/mpi_lib*.so"))

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the environment."""
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPAL_PREFIX": str(self.venv)}
        env = {**os.environ, **root, "LD_LIBRARY_PATH": f"{self.packages}/tensorflow", **variables}
        env["PATH"] = f"{self.venv}/bin:{env['PATH']}"
        command = [str(word) for word in words]  # in its folder: Python would import the package of another one
        return subprocess.run(command, cwd=self.checkout, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A copy of this checkout after `./run.sh setup --gpu`, without nvcc on PATH; the wheel is kept as usual."""
    checkout = tmp_path_factory.mktemp("gpu checkout") / "check out"
    for name in everywhere.files_of(CHECKOUT):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, checkout / name)
    env = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    env |= {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([checkout / "run.sh", "setup", "--gpu"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Environment(checkout, done.stderr)


@pytest.fixture(scope="module")
def source(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Horovod's source with both patches, and the kernels' PTX."""
    folder = tmp_path_factory.mktemp("source")
    with (folder / "log").open("w+") as log, locked(folder / "lock", "") as lock:
        return horovod._source(Steps(log, lock), sys.executable, folder, gpu=True)


@pytest.fixture(scope="module")
def fake_gpu(environment: Environment, source: Path) -> Path:
    """The program fake_gpu.cc on the environment's Horovod."""
    packages, program = environment.packages, source.parent / "fake_gpu"
    headers = [source, *(packages / folder for folder in (*cuda_kernels.HEADERS, "nvidia/nccl/include"))]
    command = ["g++", "-std=c++17", "-O1", "-w", "-rdynamic"]
    command += ["-DHAVE_CUDA=1", "-DHAVE_GPU=1", "-DHAVE_NCCL=1", "-DHAVE_MPI=1"]
    command += [word for folder in (*headers, environment.venv / "include") for word in ("-isystem", str(folder))]
    command += [str(CHECKOUT / "tests" / "launch" / "fake_gpu.cc"), "-o", str(program), str(environment.library)]
    command += [f"-L{environment.venv}/lib", "-lmpi", "-pthread", "-Wl,--allow-shlib-undefined"]
    command += [f"-Wl,-rpath,{environment.venv}/lib:{environment.library.parent}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def _fake(environment: Environment, program: Path, ranks: int, *fault: str) -> tuple[int, dict[int, str]]:
    """The exit code of fake_gpu, and what each rank said."""
    words = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    done = environment.run(*words, program, *fault)
    said = dict(re.findall(r"(?m)^rank (\d+): (.*)$", done.stdout))
    assert said and "freed twice" not in done.stderr, f"{done.stdout}\n{done.stderr}"
    return done.returncode, {int(rank): text for rank, text in said.items()}


def test_horovod_loads_with_all_symbols_from_where_they_should_be(environment: Environment) -> None:
    assert ", NCCL" in environment.said
    program = f"{SANITY}\nimport re\nprint('\\n'.join(set(re.findall('/.*', open('/proc/self/maps').read()))))"
    done = environment.run(environment.venv / "bin" / "python", "-c", program, LD_BIND_NOW="1")
    assert done.returncode == 0, done.stderr
    for name, folder in (("cudart.so.12", "nvidia/cuda_runtime/lib"), ("nccl.so.2", "nvidia/nccl/lib")):
        assert [Path(line) for line in done.stdout.splitlines() if f"lib{name}" in line] == [
            environment.packages / folder / f"lib{name}"
        ]
    mpi = [line for line in done.stdout.splitlines() if re.search(r"/libmpi\.so", line)]
    assert len(mpi) == 1 and Path(mpi[0]).parent == environment.venv / "lib"
    linked = environment.run("ldd", "-r", environment.library)
    assert "undefined symbol" not in linked.stdout + linked.stderr and "not found" not in linked.stdout
    assert "libcuda.so" not in linked.stdout  # loads where no driver is


def test_tensorflow_opens_all_of_cudas_libraries(environment: Environment) -> None:
    """Where one is missing it uses no GPU, and set-up's check names the library."""
    check: list[str | Path] = [environment.venv / "bin" / "python", "-m", "hvd_cifar.runtime.check_build", "--gpu"]
    assert environment.run(*check).returncode == 0
    (link,) = environment.packages.glob("nvidia/cusparse/lib/libcusolver.so.*")
    link.rename(aside := environment.checkout / "aside")
    try:
        done = environment.run(*check)
    finally:
        aside.rename(link)
    assert done.returncode == 1 and done.stderr.endswith("and would use no GPU: Cusolver\n"), done.stderr


def test_the_kernels_fit_every_gpu_since_pascal(environment: Environment, source: Path, tmp_path: Path) -> None:
    shutil.copy(horovod.KERNELS, kernels := source / "horovod" / "common" / "ops" / "cuda")
    ptx, entries = cuda_kernels.compile_kernels(environment.packages, kernels / "cuda_kernels.cu")
    assert ".version 8.0\n.target sm_60\n" in ptx and len(entries) == 16
    assert all(f".entry {entry}(" in ptx for entry in entries.values())
    (tmp_path / "k.ptx").write_text(ptx)
    ptxas = environment.packages / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    for number in ARCHITECTURES:
        done = environment.run(ptxas, f"-arch=sm_{number}", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_collectives_on_a_made_up_gpu(environment: Environment, fake_gpu: Path) -> None:
    code, said = _fake(environment, fake_gpu, 3)
    assert (code, said) == (0, dict.fromkeys(range(3), f"{CALLS + 3} checks, 16 kernels"))


# In the driver, a kernel (with its name), a thread that waits for CUDA, NCCL's start, a collective, and NCCL meanwhile.
FAULTS = "cuLibraryLoadData|cuLaunchKernel batched_memcpy|cudaEventQuery|ncclCommInitRank|ncclAllReduce|"
FAULTS += "ncclCommGetAsyncError"


@pytest.mark.parametrize("fault", FAULTS.split("|"))
def test_a_failed_call_is_an_error_on_every_rank(environment: Environment, fake_gpu: Path, fault: str) -> None:
    """It is named where it fails. Other ranks learn that Horovod has been shut down, or end with the job."""
    call, _, kernel = fault.partition(" ")
    code, said = _fake(environment, fake_gpu, 2, call, "1", *([kernel] if kernel else []))
    name = "NCCL async error" if "Async" in call else fault
    assert code != 0 and name in said[1], said
    assert all(text.startswith("error: ") and "WRONG" not in text for text in said.values()), said


@pytest.mark.parametrize("fault", ["", "ncclAllReduce", "cuLaunchKernel"])
def test_a_call_that_fails_leaves_no_other_operation_alone(
    environment: Environment, fake_gpu: Path, fault: str
) -> None:
    """Two operations are in flight. The second would wait for ever, or be added to the other rank's first one."""
    code, said = _fake(environment, fake_gpu, 2, fault, "1", "", "two at once")
    if not fault:
        assert (code, set(said.values())) == (0, {"1 checks, 1 kernels"})
        return
    assert code != 0 and fault in said[1]
    assert all(text.startswith("error: ") and "WRONG" not in text for text in said.values()), said


def test_a_machine_without_a_driver_trains_on_the_cpu_and_says_so(environment: Environment) -> None:
    words = ["train", "--model", "tutorial", "--dataset", "synthetic", "--max-steps", "2"]
    words += ["--run-dir", str(environment.checkout / "run")]
    script = ["sh", "-c", 'unset CUDA_VISIBLE_DEVICES; exec "$@"', "sh", str(environment.checkout / "run.sh")]
    done = environment.run(*script, "-np", "2", *words, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    # TensorFlow's own line of each rank stays: it has the driver's reason.
    notes = [line for line in done.stderr.splitlines() if line.strip() and "failed call to cuInit" not in line]
    assert len(notes) == 1 and "note: ranks compute on the CPU: nvidia-smi lists no GPU here" in notes[0], done.stderr
