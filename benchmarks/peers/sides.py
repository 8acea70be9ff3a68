"""The commands of each side: on the same net, batch, precision and data, each as its users would start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.peers.turns import Side

OURS, DDP, MULTI_WORKER, TOWERS, LIMIT = "hvd_cifar", "ddp", "multi-worker", "towers", "limit"


@dataclass(frozen=True)
class Work:
    """What every side does.

    Attributes:
        data_dir: with CIFAR-10 in its binary layout.
        peers_python: of the environment that has PyTorch.
        folder: for run directories and logs, one folder a side.
        per_rank: examples a rank processes in a step.
        threads: a rank's share of the cores.
        log_every: steps between the lines by which each side is timed.
    """

    model: str
    precision: str
    ranks: int
    per_rank: int
    threads: int
    log_every: int
    data_dir: Path
    peers_python: Path
    folder: Path


def ours(work: Work) -> Side:
    """This project as a user starts it; evaluation and checkpoints are put off, since they are not what is timed."""
    run_dir = work.folder / OURS / "run"
    words = ["horovodrun", "-np", str(work.ranks), sys.executable, "-m", "hvd_cifar", "train", *_train(work, run_dir)]
    per_step = work.per_rank * work.ranks
    name = f"hvd_cifar, {_ranks(work)}"
    return Side(name, [words], [run_dir / "metrics.jsonl"], per_step, jobs.environment())


def limit(work: Work) -> Side:
    """As many processes of this project as there are ranks, each alone: what communication could at best not cost."""
    commands, metrics = [], []
    for i in range(work.ranks):
        run_dir = work.folder / LIMIT / f"run-{i}"
        words = [sys.executable, "-m", "hvd_cifar", "train", *_train(work, run_dir)]
        commands.append([*words, "--threads-per-rank", str(work.threads), "--batch-size", str(work.per_rank)])
        metrics.append(run_dir / "metrics.jsonl")
    name = f"hvd_cifar, {work.ranks} processes that never communicate"
    return Side(name, commands, metrics, work.per_rank, jobs.environment())


def ddp(work: Work) -> Side:
    """PyTorch's DistributedDataParallel over Gloo, a process a rank."""
    run_dir = work.folder / DDP / "run"
    words = [str(work.peers_python), "-m", "benchmarks.peers.ddp", *_peer(work, run_dir)]
    words += ["--store", str(work.folder / DDP / "store"), "--depth", work.model.removeprefix("resnet")]
    words += ["--batch-size", str(work.per_rank), "--threads", str(work.threads)]
    # Rank and size as torchrun gives them, without its agent, whose heartbeats a pause would break.
    commands = [["env", f"RANK={rank}", f"WORLD_SIZE={work.ranks}", *words] for rank in range(work.ranks)]
    variables = {**_ALLOCATOR, "OMP_NUM_THREADS": str(work.threads), "GLOO_SOCKET_IFNAME": _LOOPBACK}
    name = f"PyTorch DDP, Gloo, {_ranks(work)}"
    return Side(name, commands, [run_dir / "metrics.jsonl"], work.per_rank * work.ranks, variables)


SIDES: dict[str, Callable[[Work], Side]] = {OURS: ours, DDP: ddp, LIMIT: limit}

_LOOPBACK = "lo"  # as the kernel names it
# PyTorch on a CPU asks for and returns its large buffers in every step; glibc would hand them back to the kernel, and
# take them in small pages. Without these it is 5 to 10% slower.
_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
    "MALLOC_TOP_PAD_": str(2**27),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def _train(work: Work, run_dir: Path) -> list[str]:
    """Options of `train`; what is left out is as it is by default."""
    given: list[Any] = ["--model", work.model, "--dataset", "cifar10", "--data-dir", work.data_dir]
    if work.precision != "default":
        given += ["--precision", work.precision]
    given += ["--eval-every", 0, "--checkpoint-every", 10**6, "--log-every", work.log_every]
    return [*map(str, given), "--run-dir", str(run_dir)]


def _peer(work: Work, run_dir: Path) -> list[str]:
    given = ["--data-dir", work.data_dir, "--precision", work.precision, "--log-every", work.log_every]
    return [*map(str, given), "--run-dir", str(run_dir)]


def _ranks(work: Work) -> str:
    return "1 rank" if work.ranks == 1 else f"{work.ranks} ranks"


def threads_of(ranks: int) -> int:
    """A rank's share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
