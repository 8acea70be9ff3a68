"""Groups of ranks: the first k of a job, which train by themselves as a job of k ranks would, while the others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd


class Alone:
    """Stands in the place of a Horovod process set for this rank by itself: nothing is sent, nobody is waited for."""

    def included(self) -> bool:
        """As a process set's: this rank is a member."""
        return True

    def size(self) -> int:
        """As a process set's."""
        return 1


ALONE = Alone()


def first_ranks(sizes: Sequence[int], world_size: int) -> dict[int, Any]:
    """Process sets of ranks 0 .. k - 1, by k; local, and to be called before Horovod starts.

    Those that `to_register` returns have to be given to `world.start`.
    """
    sets: dict[int, Any] = {k: hvd.ProcessSet(range(k)) for k in sizes if 1 < k < world_size}
    if 1 in sizes:
        sets[1] = ALONE
    if world_size in sizes and world_size > 1:
        sets[world_size] = hvd.global_process_set  # Horovod refuses a second set of the same ranks
    return dict(sorted(sets.items()))


def to_register(sets: Mapping[Any, Any]) -> list[Any]:
    """Those process sets that Horovod does not know by itself."""
    return [s for s in sets.values() if s is not ALONE and s is not hvd.global_process_set]
