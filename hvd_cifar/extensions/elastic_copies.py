"""Copies of an elastic job's state after each step, in the shared memory of every host, which outlives lost ranks.

One rank of each host copies the whole state. When ranks start again, they restore the newest whole copy of any host.
Variables that differ between ranks, such as local moving statistics, are then that rank's on all ranks.
"""

from __future__ import annotations

from hvd_cifar.runtime.shared_memory import NONE, TwoVersions, own_folder, versions_in
from hvd_cifar.training.callbacks import Callback, Run


def make(run: Run) -> Callback | None:
    return ElasticCopies() if run.world.elastic else None


class ElasticCopies(Callback):
    """This host's copies of the state, and how all ranks restore from them."""

    def on_build(self, run: Run) -> None:
        run.progress.fetches_each_step = True  # a copy must not hold what a bad loss has spoilt

    def on_restore(self, run: Run) -> str | None:
        import tensorflow as tf

        from hvd_cifar.distributed.collectives import pack, unpack

        job, variables = run.world.elastic, [getattr(v, "value", v) for v in run.state.variables]
        assert job is not None, "the job is elastic"
        self._packed = tf.function(lambda: pack(variables), autograph=False)  # one fetch: each has an overhead
        folder, size = run.ranks.on_every_rank(lambda: own_folder(job.name)), len(self._packed())
        is_first = run.world.local_rank == 0
        self._copies = run.ranks.on_every_rank(lambda: TwoVersions(folder, size) if is_first else None)
        newest = run.ranks.all_gather_object(max(versions_in(folder), default=NONE) if self._copies else NONE)
        found = max(newest)
        if found <= int(run.state.step.numpy()):
            return None
        root = newest.index(found)
        if self._copies and run.world.rank == root:
            unpack(self._copies.read(found), variables)
        run.state.broadcast(root)
        return "memory"

    def on_step(self, run: Run) -> None:
        run.tell("before_save")
        if self._copies:
            self._copies.write(run.step, self._packed().numpy())
