"""Collectives for callbacks, under short names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvd_cifar.distributed import collectives

T = TypeVar("T")


class Ranks:
    """Collectives of whole values: every rank calls them, in the same order."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank. Any object that can be pickled."""
        return collectives.all_gather_object(value)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return collectives.broadcast_object(value)

    def on_root(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, on every rank. Only rank 0 calls it; its error is raised on every rank."""
        return collectives.on_root(function)

    def on_every_rank(self, function: Callable[[], T]) -> T:
        """What `function` returns on this rank. An error on one rank is raised on all."""
        return collectives.on_every_rank(function)

    def barrier(self) -> None:
        """Wait for all ranks."""
        collectives.barrier()
