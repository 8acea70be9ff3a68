"""Where the time from launch to the first step goes: wall clock, processor time and collectives, by phase.

    ./run.sh -np 8 python -m benchmarks.start_up --data-dir D --model resnet20 --json start-8.json

Ranks that share cores wait for each other's computation, which ranks with cores of their own would not. Two columns do
not depend on that: how many collectives a phase makes, and how its processor time grows with the number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
import psutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Horovod's collectives, as its Python modules name them.
COLLECTIVES = ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "alltoall")
# What `assemble` calls, in its order.
PHASES = (
    ("continue_run", "run_dir"),
    ("prepare", None),
    ("_agree_on_kernels", None),
    ("make_learner", None),
    ("set_buckets", "overlap"),
    ("prove_averaging", None),
    ("claim", "run_dir"),
    ("broadcast_variables", "collectives"),
    ("_facts_of", None),
    ("record", "run_dir"),
)


class Clock:
    """Phases of this rank: (wall clock, processor time, collectives) by name, in the order of their end."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[float, float, int]] = {}
        self.collectives = 0
        self._at = self._now()

    def _now(self) -> tuple[float, float, int]:
        return time.time(), time.process_time(), self.collectives

    def lap(self, name: str) -> None:
        """End a phase that began where the last one ended."""
        now = self._now()
        self.phases[name] = (now[0] - self._at[0], now[1] - self._at[1], now[2] - self._at[2])
        self._at = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a part of the phase that is under way."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                now = self._now()
                self.phases[f"  {name}"] = (now[0] - began[0], now[1] - began[1], now[2] - began[2])

        return call

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of Horovod's library that counts its calls."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.collectives += 1
            return function(*args, **kwargs)

        return call


def seconds_since_launch() -> float:
    """Seconds since the launcher's process started, or this one where there is no launcher."""
    parents = psutil.Process().parents()
    launchers = [p for p in parents if "hvd_cifar.launch" in p.cmdline() or "mpirun" in p.name()]
    return time.time() - min((p.create_time() for p in launchers), default=psutil.Process().create_time())


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="Embedded set: folder.")
@click.option("--model", default="tutorial")
@click.option("--batch-size", type=click.IntRange(1), default=1, help="Examples of a rank; few make short steps.")
@click.option("--json", "json_file", type=Path, help="File to write the phases to.")
def main(data_dir: Path, model: str, batch_size: int, json_file: Path | None) -> None:
    """Start as `train` does, up to the end of the first step, and print the phases."""
    launched = seconds_since_launch()
    clock = Clock()
    from hvd_cifar.reporting.quiet import quiet_start

    with quiet_start():
        import tensorflow as tf
        from horovod.tensorflow import mpi_ops

        from hvd_cifar.config import TrainSettings, make
        from hvd_cifar.distributed import collectives
        from hvd_cifar.runtime.world import session
        from hvd_cifar.training import assemble, run_dir
        from hvd_cifar.training.step import Notes
        from hvd_cifar.training.work import UserObjects
    for name in COLLECTIVES:
        counted = clock.counted(getattr(mpi_ops.MPI_LIB, f"horovod_{name}"))
        setattr(mpi_ops.MPI_LIB, f"horovod_{name}", tf.autograph.experimental.do_not_convert(counted))
    for name, place in PHASES:
        owner = getattr(assemble, place) if place else assemble
        setattr(owner, name, clock.timed(name, getattr(owner, name)))
    clock.lap("imports")
    with session(threads=1) as world, tempfile.TemporaryDirectory() as folder:
        clock.lap("session: MPI and Horovod start")
        collectives.barrier()
        clock.lap("first barrier")
        given = {"model": model, "dataset": "synthetic", "data_dir": str(data_dir), "batch_size": batch_size}
        settings = make(TrainSettings, {**given, "max_steps": 3, "run_dir": f"{folder}/run"})
        trainer = assemble.assemble(settings, world, UserObjects())
        clock.lap("assemble")
        for step, micro_batches in enumerate(trainer.batches(0)):
            trainer.step(step, micro_batches, 1.0, Notes())[0].numpy()
            clock.lap(f"step {step + 1}")
        run_dir.release()
        whole = launched + sum(wall for name, (wall, _, _) in clock.phases.items() if not name.startswith(" "))
        by_rank = collectives.all_gather_object((world.host, clock.phases))
        if world.is_root:
            _report(launched, whole, by_rank, json_file)


def _report(launched: float, whole: float, by_rank: list[Any], json_file: Path | None) -> None:
    names = list(by_rank[0][1])
    ranks = len(by_rank)
    hosts = len({host for host, _ in by_rank})
    rows = {}
    for name in names:
        # Rank 0 alone calls some functions.
        walls, cpus, calls = zip(*(phases.get(name, (0.0, 0.0, 0)) for _, phases in by_rank), strict=True)
        rows[name] = {
            "wall": max(walls),
            "least_wall": min(walls),
            "cpu": sum(cpus) / ranks,
            "cpu_of_rank_0": cpus[0],
            "collectives": calls[0],
        }
    print(f"{ranks} ranks on {hosts} hosts: {launched:.2f} s to rank 0's first line of Python, {whole:.2f} s in all")
    print("| phase | wall, s | processor, s a rank | of rank 0 | collectives |\n|---|---|---|---|---|")
    for name, r in rows.items():
        print(f"| {name} | {r['wall']:.3f} | {r['cpu']:.3f} | {r['cpu_of_rank_0']:.3f} | {r['collectives']} |")
    if json_file:
        found = {"ranks": ranks, "hosts": hosts, "launched": launched, "whole": whole, "phases": rows}
        json_file.write_text(json.dumps({**found, "command": sys.argv}, indent=1))


if __name__ == "__main__":
    main()
