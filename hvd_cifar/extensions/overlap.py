"""--overlap: gradient buckets, chosen by measurements before the first step."""

from __future__ import annotations

from hvd_cifar.training.callbacks import Callback, Run


def make(run: Run) -> Callback | None:
    """The choice; None where no message is sent."""
    return Overlap() if run.world.size > 1 else None


class Overlap(Callback):
    """Gives the run's optimizer its buckets."""

    def on_build(self, run: Run) -> None:
        """Measure and choose."""
        from hvd_cifar.training.overlap import set_buckets
        from hvd_cifar.training.work import step_spec

        sharding, batch = run.work.sharding, run.plan.global_batch_size
        examples = -(-batch // (run.world.size * sharding.micro_batches))
        for line in set_buckets(run.settings, run.world, run.net, run.optimizer, step_spec(run.work), examples):
            run.say(line)
