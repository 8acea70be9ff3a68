"""The commands of each side: on the same net, batch, precision and data, each as its users would start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.peers import network
from benchmarks.peers.turns import Side
from hvd_cifar.data import sampler
from tests.cluster.hosts import INTERFACE, Host
from tests.cluster.jobs import variables

OURS, OURS_AT_ONCE, DDP, LIMIT = "hvd_cifar", "hvd_cifar-one-message", "ddp", "limit"
EXAMPLES = 50_000  # of CIFAR-10's training set
FAST_BATCH = 1024  # of `fast`, over all ranks
ENDLESS = 10_000  # epochs: no side may end while it is measured
PATIENCE = str(24 * 3600)  # seconds, of Horovod's Gloo: ranks are stopped while others are measured


@dataclass(frozen=True)
class Work:
    """What every side does."""

    model: str
    precision: str
    ranks: int
    per_rank: int  # examples that a rank processes in a step
    threads: int  # a rank's share of the cores
    log_every: int  # steps between the lines by which each side is timed
    data_dir: Path  # with CIFAR-10 in its binary layout
    peers_python: Path  # of the environment that has PyTorch
    folder: Path  # for run directories and logs, one folder a side
    hosts: tuple[Host, ...] = ()  # with as many ranks each; none: all ranks are on this machine


def ours(work: Work, at_once: bool = False) -> Side:
    """This project as a user starts it; evaluation and checkpoints are put off, since they are not what is timed.

    `at_once`: all gradients leave in one message.
    """
    run_dir = work.folder / (OURS_AT_ONCE if at_once else OURS) / "run"
    words = ["horovodrun", "-np", str(work.ranks), sys.executable, "-m", "hvd_cifar"]
    if work.hosts:
        slots = ",".join(f"{host.name}:{work.ranks // len(work.hosts)}" for host in work.hosts)
        words = [sys.executable, "-m", "hvd_cifar.launch", "-H", slots]
    words += ["train", *_train(work, run_dir), "--batch-size", str(work.per_rank)]
    words += ["--overlap", "off"] if at_once else []
    name = f"hvd_cifar{', one message' if at_once else ''}, {_ranks(work)}"
    return _side(work, name, [words], [run_dir / "metrics.jsonl"], _per_step(work.per_rank * work.ranks))


def limit(work: Work) -> Side:
    """As many processes of this project as there are ranks, each alone: the upper limit, without communication."""
    commands, metrics = [], []
    for i in range(work.ranks):
        run_dir = work.folder / LIMIT / f"run-{i}"
        words = [sys.executable, "-m", "hvd_cifar", "train", *_train(work, run_dir)]
        commands.append([*words, "--threads-per-rank", str(work.threads), "--global-batch-size", str(work.per_rank)])
        metrics.append(run_dir / "metrics.jsonl")
    name = f"hvd_cifar, {work.ranks} processes that never communicate"
    return _side(work, name, commands, metrics, _per_step(work.per_rank))


def ddp(work: Work) -> Side:
    """PyTorch's DistributedDataParallel over Gloo, a process a rank."""
    run_dir = work.folder / DDP / "run"
    given: list[Any] = ["--data-dir", work.data_dir, "--precision", work.precision, "--log-every", work.log_every]
    given += ["--run-dir", run_dir, "--store", work.folder / DDP / "store", "--model", work.model]
    given += ["--batch-size", work.per_rank, "--threads", work.threads]
    words = [str(work.peers_python), "-m", "benchmarks.peers.ddp", *map(str, given)]
    # Rank and size as torchrun gives them, without its agent, whose heartbeats a pause would break.
    commands = [["env", f"RANK={rank}", f"WORLD_SIZE={work.ranks}", *words] for rank in range(work.ranks)]
    name, per_step = f"PyTorch DDP, Gloo, {_ranks(work)}", _per_step(work.per_rank * work.ranks)
    settings = {"OMP_NUM_THREADS": str(work.threads), "GLOO_SOCKET_IFNAME": INTERFACE if work.hosts else "lo"}
    side = _side(work, name, commands, [run_dir / "metrics.jsonl"], per_step)
    return replace(side, environment={**side.environment, **settings})


SIDES: dict[str, Callable[[Work], Side]] = {
    OURS: ours,
    OURS_AT_ONCE: partial(ours, at_once=True),
    DDP: ddp,
    LIMIT: limit,
}


def sides_of(model: str, over_hosts: bool = False) -> list[str]:
    """The names of the sides that can train a model. The second one is the reference of the ratios."""
    return [OURS, *[DDP] * (model != "fast"), *[OURS_AT_ONCE] * over_hosts, LIMIT]


def _side(
    work: Work, name: str, commands: Sequence[Sequence[str]], metrics: Sequence[Path], images_per_step: float
) -> Side:
    """A side whose commands, one for each rank or one for all, run where the ranks do."""
    environment = jobs.environment()
    if work.hosts:
        hosts = [work.hosts[rank * len(work.hosts) // work.ranks] for rank in range(len(commands))]
        commands = [network.words_on(host, words) for host, words in zip(hosts, commands, strict=True)]
        # MPI names a job's files after host and process id, which two sides may share.
        settings = {"OMPI_MCA_orte_tmpdir_base": str(work.hosts[0].own), "HOROVOD_GLOO_TIMEOUT_SECONDS": PATIENCE}
        environment = variables(work.hosts[0]) | settings
    return Side(name, commands, metrics, images_per_step, environment)


def _per_step(batch: int) -> float:
    """Images of a step on average: the last one of an epoch has what is left."""
    return EXAMPLES / sampler.steps_per_epoch(EXAMPLES, batch)


def _train(work: Work, run_dir: Path) -> list[str]:
    """Options of `train`; the others keep their defaults."""
    given: list[Any] = ["--model", work.model, "--precision", work.precision]
    given += ["--dataset", "cifar10", "--data-dir", work.data_dir]
    given += ["--eval-every", 0, "--checkpoint-every", 10**6, "--log-every", work.log_every, "--epochs", ENDLESS]
    given += ["--set", "image_scales=1"] if work.model == "fast" else []  # full size throughout
    return [*map(str, given), "--run-dir", str(run_dir)]


def _ranks(work: Work) -> str:
    return "1 rank" if work.ranks == 1 else f"{work.ranks} ranks"


def threads_of(ranks: int) -> int:
    """A rank's share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
