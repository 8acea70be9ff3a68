"""Which GPU and how many threads, on machines that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cifar.errors import UserError
from hvd_cifar.runtime.devices import (
    choose_gpu,
    cpu_quota,
    multiplies_bfloat16,
    processor,
    threads_per_rank,
    visible_gpus,
)
from hvd_cifar.runtime.environment import RING_PARAMETERS, all_reduce, launched_rank, prepare_mpi, tcp_network

EIGHT = [f"GPU-{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("views", "choices"),
    [
        ([[]], [None]),
        ([EIGHT] * 8, list(range(8))),
        # The scheduler shows each process a GPU of its own, or two.
        ([["GPU-0"], ["GPU-1"], ["GPU-2"]], [0, 0, 0]),
        ([["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]], [0, 0]),
    ],
)
def test_one_gpu_for_each_local_rank(views: list[list[str]], choices: list[int | None]) -> None:
    assert [choose_gpu(views, rank) for rank in range(len(views))] == choices


@pytest.mark.parametrize(
    ("views", "error"),
    [
        ([["GPU-0", "GPU-1"]] * 3, "3 ranks on this host share 2 GPUs: start at most 2"),
        ([["GPU-0"], []], "local rank 1 sees no GPU"),
    ],
)
def test_too_few_gpus_are_an_error_on_every_rank(views: list[list[str]], error: str) -> None:
    for rank in range(len(views)):
        with pytest.raises(UserError, match=error):
            choose_gpu(views, rank)


LISTING = "GPU 0: NVIDIA H100 (UUID: GPU-aa)\nGPU 1: NVIDIA H100 (UUID: GPU-bb)\nGPU 2: NVIDIA H100 (UUID: GPU-cc)\n"


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, ["GPU-aa", "GPU-bb", "GPU-cc"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-cc", "GPU-aa"]),
        ("GPU-b", ["GPU-bb"]),
        ("1,7,0", ["GPU-bb"]),  # CUDA stops at the first that does not exist
    ],
)
def test_cuda_visible_devices(chosen: str | None, seen: list[str]) -> None:
    assert visible_gpus(LISTING, {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == seen


def _mask(*cpus: int) -> frozenset[int]:
    return frozenset(cpus)


@pytest.mark.parametrize(
    ("masks", "quota", "threads"),
    [
        ([_mask(*range(8))] * 2, None, [4, 4]),
        ([_mask(0, 1)] * 4, None, [1] * 4),  # more ranks than cores
        ([_mask(0), _mask(1)], None, [1, 1]),  # mpirun binds each rank to a core
        ([_mask(0, 1, 2, 3), _mask(2, 3, 4, 5)], None, [2, 2]),  # overlapping masks
        ([_mask(*range(64))], 2.0, [2]),  # a container with a quota of 2 cores on a host of 64
        ([_mask(*range(64))], 0.5, [1]),
    ],
)
def test_cores_are_divided_between_the_ranks_of_a_host(
    masks: list[frozenset[int]], quota: float | None, threads: list[int]
) -> None:
    assert [threads_per_rank(masks, rank, quota) for rank in range(len(masks))] == threads


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        # Groups in groups, as systemd and Slurm make them: the smallest limit counts.
        ({"job/cpu.max": "50000 100000\n", "job/step/cpu.max": "150000 100000\n", "cpu.max": "max 1"}, 0.5),
        ({"cpu/old/cpu.cfs_quota_us": "300000\n", "cpu/old/cpu.cfs_period_us": "100000\n"}, 3.0),
        ({"other/cpu.max": "100000 100000\n", "memory/old/cpu.max": "100000 100000\n"}, None),
    ],
)
def test_cpu_quota_of_control_groups(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    _write_groups(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


def _write_groups(root: Path, files: dict[str, str]) -> None:
    """Files of control groups of both versions, and of the process, which is in a group of each."""
    (root / "proc" / "self").mkdir(parents=True)
    described = "3:cpu,cpuacct:/old\n2:memory:/old\n1:name=systemd:/\n0::/job/step\n"
    (root / "proc" / "self" / "cgroup").write_text(described)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_launcher_s_rank() -> None:
    for name, value, rank in (("PMIX_RANK", "7", 7), ("HOROVOD_RANK", "1", 1), ("HOROVOD_RANK", "none", None)):
        assert launched_rank({name: value}) == rank
    assert launched_rank({}) is None


def test_what_ranks_on_a_cpu_get_beside_what_the_user_has_set(tmp_path: Path) -> None:
    found = {}
    for on_cpu in (True, False):
        environment = {"HOROVOD_CYCLE_TIME": "1", "OMPI_COMM_WORLD_RANK": "0"}
        prepare_mpi(environment, on_cpu=on_cpu, prefix=tmp_path)
        found[on_cpu] = environment
    ours = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_IDLE_CYCLE_TIME": "50", "HOROVOD_SHARES_CORE": "1"}
    assert found[False] == {"HOROVOD_CYCLE_TIME": "1", "OMPI_COMM_WORLD_RANK": "0"}
    assert found[True] == found[False] | ours
    prepare_mpi(untouched := {"OMPI_COMM_WORLD_RANK": "0"}, on_cpu=True)
    assert untouched["HOROVOD_CYCLE_TIME"] == "0.5"


def test_a_process_alone_does_not_look_for_other_ranks(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    prepare_mpi(environment, on_cpu=False, prefix=tmp_path)
    assert environment == {"SLURM_JOB_ID": "7", "OMPI_MCA_ess_singleton_isolated": "1"}
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    alone: dict[str, str] = {}
    prepare_mpi(alone, on_cpu=False, prefix=tmp_path)
    assert alone == {"OMPI_MCA_ess_singleton_isolated": "1", "OPAL_PREFIX": str(tmp_path)}
    of_srun = {"PMIX_RANK": "0", "SLURM_STEP_ID": "0"}
    prepare_mpi(of_srun, on_cpu=False, prefix=tmp_path)
    assert of_srun == {"PMIX_RANK": "0", "SLURM_STEP_ID": "0"}


RING = {f"OMPI_MCA_{name}": value for name, value in RING_PARAMETERS.items()}
SHARED = {"HOROVOD_SHARES_CORE": "1"}


@pytest.mark.parametrize(
    ("controller", "by_nccl", "environ", "hosts", "two_levels", "expected"),
    [
        ("mpi", False, {}, 1, False, "MPI's choice"),
        ("mpi", False, RING, 1, False, "ring"),
        ("gloo", False, {}, 2, True, "ring in two levels"),
        ("mpi", False, SHARED, 2, True, "ring in two levels"),
        ("mpi", True, RING, 2, True, "NCCL's choice"),
        ("gloo", True, {"NCCL_ALGO": "Ring"}, 2, False, "ring"),
    ],
)
def test_which_all_reduce_runs(
    controller: str, by_nccl: bool, environ: dict[str, str], hosts: int, two_levels: bool, expected: str
) -> None:
    assert all_reduce(controller, by_nccl, environ, hosts, two_levels) == expected


@pytest.mark.parametrize(
    ("pml", "by_nccl", "hosts", "found"),
    [
        ("ob1", False, 2, True),
        ("", False, 2, True),
        ("ucx", False, 2, False),
        ("", True, 2, False),
        ("", False, 1, False),
    ],
)
def test_a_run_names_its_network_where_tcp_carries_the_gradients(
    pml: str, by_nccl: bool, hosts: int, found: bool
) -> None:
    environ = {"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"} | ({"OMPI_MCA_pml": pml} if pml else {})
    assert tcp_network(environ, by_nccl, hosts) == "10.0.0.0/24" * found


def test_bfloat16_is_multiplied_where_the_processor_says_so(tmp_path: Path) -> None:
    assert not multiplies_bfloat16(tmp_path / "cpuinfo")
    for flags in ("fpu avx512_bf16 clzero", "fpu amx_bf16", "fp asimd bf16", "fpu avx512_bf16x"):  # the third of ARM
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        assert multiplies_bfloat16(tmp_path / "cpuinfo") == ("bf16x" not in flags)


def test_what_decides_how_a_processor_divides_sums(tmp_path: Path) -> None:
    first = "processor\t: 0\nmodel name\t: AMD EPYC\ncpu MHz\t\t: {}\ncache size\t: 1024 KB\nflags\t: {} fpu sse avx2\n"
    found = []
    for megahertz, flags in ((2000.1, "avx512f"), (3000.2, "avx512f ibpb"), (2000.1, "")):
        (tmp_path / "cpuinfo").write_text(f"{first.format(megahertz, flags)}\nprocessor\t: 1\nmodel name\t: other\n")
        found.append(processor(tmp_path / "cpuinfo"))
    assert found[0] == found[1] == ("AMD EPYC", "1024 KB avx2 avx512f") and found[2] == ("AMD EPYC", "1024 KB avx2")
    assert processor(tmp_path / "nothing") == ("an unknown CPU", "")
