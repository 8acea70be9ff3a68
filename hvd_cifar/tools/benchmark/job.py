"""The ranks of a benchmark, the groups of them that it measures, and the facts of the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvd_cifar.distributed import collectives, process_sets
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import provenance
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.runtime.world import World, session, versions
from hvd_cifar.tools.benchmark.results import Facts


@dataclass(frozen=True)
class Job:
    """This rank's part of the job, and process sets of ranks 0 .. k - 1 by k."""

    world: World
    sets: dict[int, Any]

    def includes_me(self, k: int) -> bool:
        """Whether this rank is one of the first k."""
        return self.world.rank < k


def sizes_to_measure(chosen: Sequence[int] | None, world_size: int, least: int = 1) -> list[int]:
    """Numbers of ranks: the chosen ones, or powers of two from `least` on, and all.

    Raises:
        UserError: where a number is above the job's ranks or below `least`.
    """
    if world_size < least:
        raise UserError(f"this job has {world_size} rank; this benchmark needs {least}: start more (-np {least})")
    if chosen is None:
        powers = [2**i for i in range(world_size.bit_length()) if least <= 2**i <= world_size]
        return sorted({*powers, world_size})
    for k in chosen:
        if k > world_size:
            raise UserError(f"--ranks {k}: this job has {world_size}; start more (-np {k}), or give a smaller number")
        if k < least:
            raise UserError(f"--ranks {k}: one rank alone has nothing to reduce; give at least {least}")
    return sorted(set(chosen))


@contextmanager
def start(chosen: Sequence[int] | None, least: int = 1, threads: int | None = None) -> Iterator[Job]:
    """Start this rank with process sets of the numbers of ranks to measure.

    Raises:
        UserError: where the job has too few ranks, or does not say how many.
    """
    size = launched_size()
    if size is None:
        raise UserError("the launcher does not say how many ranks it starts: use ./run.sh, horovodrun or mpirun")
    sets = process_sets.first_ranks(sizes_to_measure(chosen, size, least), size)
    with session(threads, process_sets=process_sets.to_register(sets)) as world:
        if world.size != size:
            raise UserError(f"the launcher said {size} ranks, but Horovod found {world.size}: start with ./run.sh")
        yield Job(world, sets)


def facts_of(world: World) -> Facts:
    """The facts of this job; a collective."""
    hosts, local_ranks = zip(*collectives.all_gather_object((world.host, world.local_rank)), strict=True)
    return collectives.broadcast_object(
        Facts(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=provenance.command(),
            git_commit=provenance.git_commit() if world.is_root else None,
            versions=versions(),
            processor=_gpu() if "GPU" in world.device else devices.processor(Path("/proc/cpuinfo"))[0],
            cores=len(os.sched_getaffinity(0)),
            hosts=list(hosts),
            local_ranks=list(local_ranks),
            device=world.device,
            threads=world.threads,
            controller=world.controller,
            algorithm=world.algorithm,
            transport=world.transport,
        )
    )


def _gpu() -> str:
    found = re.search(r"^GPU \d+: (.*?) \(UUID", devices.list_gpus(), re.MULTILINE)
    return found[1] if found else "an unknown GPU"
