"""--on-nan rollback: return to the newest good checkpoint, and continue with a lower learning rate."""

from __future__ import annotations

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import DIVERGED, Diverged
from hvd_cifar.training import random_layers
from hvd_cifar.training.callbacks import MovingStatistics
from hvd_cifar.training.checkpoint import Checkpoints, State
from hvd_cifar.training.trainer import Trainer

RATE_FACTOR = 0.5  # multiplies the learning rate at each rollback
MOST_ROLLBACKS = 3


class Rollback:
    """Returns a run to a checkpoint, in the same processes, when its loss or a weight is not finite."""

    def __init__(
        self, trainer: Trainer, state: State, checkpoints: Checkpoints | None, statistics: MovingStatistics
    ) -> None:
        """`checkpoints`: None on ranks other than 0."""
        self.trainer = trainer
        self.state = state
        self.checkpoints = checkpoints
        self.statistics = statistics

    def __call__(self, failure: Diverged) -> None:
        """Go back. A collective: all ranks have the same failure.

        Raises:
            Diverged: where there is no checkpoint, or the run has gone back `MOST_ROLLBACKS` times.
        """
        run, progress, reporter = self.trainer.run, self.trainer.progress, self.trainer.reporter
        most = MOST_ROLLBACKS
        if progress.rollbacks >= most:
            raise Diverged(f"{failure}; the run went back {most} times before") from failure
        from_step, checkpoints = run.step, self.checkpoints
        with progress.aside("restart"):
            path = collectives.on_root(lambda: checkpoints.go_back(failure.weights_step) if checkpoints else None)
            if path is None:
                raise failure
            collectives.broadcast_variables(self.state.variables)
            random_layers.separate(run.model, run.world.rank)
            progress.go_back(int(self.state.step.numpy()), RATE_FACTOR)
            self.statistics.averaged_step = run.step
            collectives.on_root(lambda: reporter.go_back(run.step, run.settings.record_examples))
        # Without DIVERGED, at which the launcher would not restart the run.
        reason = str(failure).partition(";")[0].removeprefix(DIVERGED).removeprefix(" with ").removeprefix(": ")
        reporter.warn(
            f"{reason}: rollback {progress.rollbacks} of {most} from step {from_step} to {path.name}; "
            f"the learning rate is {progress.rate_factor:g} times the schedule's from here on"
        )
        reporter.rolled_back(run.step, from_step, progress.rate_factor)
        self.trainer.tell("on_rollback")
