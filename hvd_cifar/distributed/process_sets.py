"""Process sets of some ranks of a job, which measure while the others wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd


class Alone:
    """A process set of this rank alone, which needs no communication."""

    def included(self) -> bool:
        """This rank is a member."""
        return True

    def size(self) -> int:
        """Its number of ranks."""
        return 1


ALONE = Alone()


def first_ranks(sizes: Sequence[int], world_size: int) -> dict[int, Any]:
    """Process sets of ranks 0 .. k - 1, by k. Local; call it before Horovod starts.

    Pass what `to_register` returns for these to `world.start`.
    """
    sets: dict[int, Any] = {k: hvd.ProcessSet(range(k)) for k in sizes if 1 < k < world_size}
    if 1 in sizes:
        sets[1] = ALONE
    if world_size in sizes and world_size > 1:
        sets[world_size] = hvd.global_process_set  # Horovod refuses a second set of the same ranks
    return dict(sorted(sets.items()))


@contextmanager
def joined(ranks: Sequence[int]) -> Iterator[Any]:
    """A process set of some ranks, while the block runs. A collective of all ranks.

    Start the world with `process_sets="dynamic"`. No other process set may have the same ranks.
    """
    process_set = hvd.add_process_set(sorted(ranks))
    yield process_set
    hvd.remove_process_set(process_set)


def to_register(sets: Mapping[Any, Any]) -> list[Any]:
    """The process sets that Horovod must register."""
    return [s for s in sets.values() if s is not ALONE and s is not hvd.global_process_set]
