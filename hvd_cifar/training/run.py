"""`train`: from settings to the summary of a run, on every rank."""

from __future__ import annotations

from typing import Any

from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed import collectives
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.watch import IDLE, Watch
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training import run_dir
from hvd_cifar.training.assemble import assemble
from hvd_cifar.training.plan import is_deterministic, threads_of
from hvd_cifar.training.trainer import OfUser


def train(settings: TrainSettings, given: OfUser | None = None) -> dict[str, Any]:
    """Train as the settings say, on all ranks of this job; rank 0 prints and writes.

    Returns:
        The summary of the run, as in summary.json; the same on every rank.

    Raises:
        UserError: where a setting does not fit the machine, the data or the run directory.
        TrainingError: where the loss is not finite, gradients are not averaged, or ranks are out of sync.
    """
    watch = Watch(settings.stall_seconds)
    try:
        with session(threads_of(settings), is_deterministic(settings)) as world:
            _introduce(watch, world)
            try:
                summary = assemble(settings, world, given or OfUser(), watch).train()
            finally:
                run_dir.release()
            watch.mark("shutdown")
            return summary
    finally:
        watch.mark(IDLE)


def _introduce(watch: Watch, world: World) -> None:
    """Exchange the addresses of all ranks' watchdogs, and test the connections. A collective."""
    peer, secret = watch.listen(world.rank, world.size == world.local_size)
    watch.trust(collectives.broadcast_object(secret))
    watch.join(collectives.all_gather_object(peer))  # also a barrier: after it every rank has the secret
    if not all(collectives.all_gather_object(watch.reaches((world.rank + 1) % world.size))):
        watch.stop()
        if world.is_root:
            terminal.complain(
                "hvd_cifar: warning: the ranks' watchdogs do not reach each other, so a rank that hangs is not named, "
                "and the run does not end; let TCP connections between the hosts through"
            )
    watch.mark("set-up")
