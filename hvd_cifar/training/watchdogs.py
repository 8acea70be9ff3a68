"""The ranks' watchdogs: how they learn of each other."""

from __future__ import annotations

from hvd_cifar.distributed import collectives
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World


def introduce(watch: Watch, world: World) -> None:
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
