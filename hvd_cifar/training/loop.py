"""The training loop: the page to read first."""

from __future__ import annotations

from hvd_cifar.config import TrainSettings
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training.assemble import assemble
from hvd_cifar.training.recipe import resolve


def train(settings: TrainSettings) -> None:
    """Train as the settings say, on all ranks of this job; rank 0 prints and writes.

    Raises:
        UserError: where a setting does not fit the machine, the data or the run directory.
        TrainingError: where the loss is not finite, or the ranks do not average or do not agree.
    """
    settings = resolve(settings)
    with session(settings.threads_per_rank, bool(settings.deterministic)) as world:
        train_in(world, settings)


def train_in(world: World, settings: TrainSettings) -> None:
    """Train as resolved settings say, on ranks that have started."""
    with assemble(settings, world) as run:
        for slices in run.batches:
            run.step(slices)
            if run.step_is_due(settings.log_every):
                run.log()
            if run.sync_check_is_due():
                run.check_sync()
            if run.evaluation_is_due():
                run.evaluate()
            if run.step_is_due(settings.checkpoint_every) or run.checkpoint_was_requested:
                run.save()
        run.finish()
