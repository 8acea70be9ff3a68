"""The best weights (--hold-out, --validation-ranks), and --early-stopping."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hvd_cifar import fields
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.evaluate import Evaluation

LINK = "best"
RESULT = "result.json"  # in the checkpoint of the best weights: their `Evaluation`


class Settings(fields.Settings):
    early_stopping: int | None = Field(None, gt=0)
    """End the run after this many evaluations in a row without a higher accuracy. [default: never]"""


def make(run: Run) -> Callback | None:
    patience = run.options(Settings).early_stopping
    return BestWeights(patience) if run.world.beside or run.settings.hold_out or patience else None


class BestWeights(Callback):
    """Has the link `best` keep the checkpoint of the best evaluation, and ends a run by --early-stopping."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best: Evaluation | None = None
        self.evaluated: set[int] = set()  # steps

    def on_start(self, run: Run) -> None:
        """Continue from the recorded evaluations."""
        self.best = run.ranks.on_root(lambda: self._best_so_far(run))
        self.evaluated = run.ranks.on_root(lambda: set(run.reporter.evaluated[run.watched]))
        self._end_where_due(run)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Compare with the best one so far. All ranks have the same two, and decide the same."""
        if evaluation.part != run.watched:
            return
        self.evaluated.add(evaluation.step)
        if self.best is not None and _merit(evaluation) <= _merit(self.best):
            self._end_where_due(run)
            return
        self.best = evaluation
        if evaluation.step == run.step:  # else it is of validation ranks, which evaluate a checkpoint
            run.save()
        if run.world.is_root:
            with run.files_may_fail(f"the best weights, of step {evaluation.step}, are not kept"):
                self._keep(run, evaluation)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        if self.best:
            accuracy = {f"{run.watched}_accuracy": self.best.plain_accuracy}
            summary["best_evaluation"] = {"step": self.best.step, **accuracy}

    def _best_so_far(self, run: Run) -> Evaluation | None:
        """The evaluation of the best weights; None where there is none, or the run has gone back to an earlier step."""
        from hvd_cifar.training.evaluate import Evaluation

        best = Evaluation.read(run.run_dir / LINK / RESULT)
        return best if best and best.step <= run.step else None

    def _keep(self, run: Run, evaluation: Evaluation) -> None:
        checkpoint, new = Path("checkpoints", f"step-{evaluation.step}"), run.run_dir / f".{LINK}"
        evaluation.write(run.run_dir / checkpoint / RESULT)
        new.unlink(missing_ok=True)
        new.symlink_to(checkpoint)
        new.replace(run.run_dir / LINK)

    def _end_where_due(self, run: Run) -> None:
        if not (self.patience and self.best) or run.step == run.total_steps or run.progress.ends_early:
            return
        since = sum(step > self.best.step for step in self.evaluated)
        if since >= self.patience:
            run.end_after_this_step(
                f"{since} evaluations in a row have no higher {run.watched} accuracy than "
                f"{self.best.plain_accuracy:.2%} of step {self.best.step} (--early-stopping {self.patience})"
            )
            run.say(f"step {run.step} is the last one: {run.progress.ends_early}")


def _merit(evaluation: Evaluation) -> tuple[float, int]:
    return evaluation.plain_accuracy, -evaluation.step  # the first of equal accuracies counts
