"""--on-nan: what a run does where a loss, a weight or a value of the optimizer is infinite or NaN.

All ranks have the same loss, weights and optimizer, so all act at the same step without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from hvd_cifar import fields
from hvd_cifar.errors import DIVERGED, Diverged
from hvd_cifar.training.callbacks import Callback, Run, StepObserver

# A damaged image or a flipped bit spoils a step or two. If this many steps in a row are skipped, the weights or the
# learning rate are at fault, and more steps would only use up the data.
MOST_SKIPS_IN_A_ROW = 10
RATE_FACTOR = 0.5  # multiplies the learning rate at each rollback
MOST_ROLLBACKS = 3


class Settings(fields.Settings):
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do if the loss or a weight is not finite. stop: end the run; skip: skip the step's update on all ranks;
    rollback: continue from the newest good checkpoint with a lower learning rate. See docs/reliability.md."""


def make(run: Run) -> Callback:
    kinds = {"stop": BadNumbers, "skip": Skip, "rollback": Rollback}
    return kinds[run.options(Settings).on_nan]()


class BadNumbers(Callback):
    """Keeps what earlier processes have skipped and lowered, whatever --on-nan says now; stops at a bad number."""

    def __init__(self) -> None:
        self.skipped_before = 0  # steps, in earlier processes

    def on_build(self, run: Run) -> None:
        self.skipped = run.state.number("skipped", 0)
        self.factor = run.state.number("rate_factor", 1.0)

    def on_start(self, run: Run) -> None:
        self.skipped_before = int(self.skipped.numpy())
        run.progress.rate_factor = float(self.factor.numpy())

    def before_save(self, run: Run) -> None:
        self.skipped.assign(self.skipped_before + len(run.progress.skipped))
        self.factor.assign(run.progress.rate_factor)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        summary["skipped_steps"] = self.skipped_before + len(run.progress.skipped)
        summary["learning_rate_factor"] = run.progress.rate_factor


class Skip(BadNumbers, StepObserver):
    """--on-nan skip: undoes a step that is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.in_a_row = self.last = self.told = 0

    def on_build(self, run: Run) -> None:
        super().on_build(run)
        self.run = run
        run.observe(self)

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, which changes nothing where loss, weights or optimizer are not finite; its loss is then NaN.

        A gradient that overflows under loss scaling leaves them finite: the optimizer halves the scale, and the step
        does not count as skipped.
        """
        import tensorflow as tf

        run, variables = self.run, self.run.state.of_step()
        checked = [*run.model.trainable_variables, *run.optimizer.variables]
        floating = [v for v in checked if tf.as_dtype(v.dtype).is_floating]

        @tf.function(autograph=False)
        def keep() -> list[Any]:
            return [tf.identity(v.value) for v in variables]

        @tf.function(autograph=False)
        def undo_bad(results: Any, kept: Sequence[Any]) -> Any:
            sound = [tf.reduce_all(tf.math.is_finite(v.value)) for v in floating]
            is_good = tf.reduce_all(tf.stack([tf.math.is_finite(results[0]), *sound]))

            def put_back() -> None:
                for variable, value in zip(variables, kept, strict=True):
                    variable.assign(value)
                for observer in run.observers:
                    observer.on_skip()

            tf.cond(is_good, lambda: None, put_back)
            nan = tf.constant(float("nan"), results.dtype)
            loss = tf.where(is_good | ~tf.math.is_finite(results[0]), results[0], nan)
            return tf.concat([[loss], results[1:]], 0)

        def guarded(*arguments: Any) -> Any:
            kept = keep()
            return undo_bad(step(*arguments), kept)

        return guarded

    def on_bad_loss(self, run: Run, step: int, loss: float) -> bool:
        self.in_a_row = self.in_a_row + 1 if step == self.last + 1 else 1
        self.last = step
        run.progress.skipped[step] = loss
        if self.in_a_row == MOST_SKIPS_IN_A_ROW:
            how = f"loss = {loss} at step {step}, and {MOST_SKIPS_IN_A_ROW} steps in a row were skipped"
            raise run.progress.diverged(how, None)
        return True

    def on_step(self, run: Run) -> None:
        found = list(run.progress.skipped.items())
        for step, loss in found[self.told :]:
            run.warn(f"step {step} is skipped on all ranks: its loss ({loss}) or its update is not finite", step)
            run.record("skip", step=step)
        self.told = len(found)

    def before_checkpoint(self, run: Run) -> None:
        self.on_step(run)


class Rollback(BadNumbers):
    """--on-nan rollback: returns the run to a checkpoint, in the same processes, with a lower learning rate."""

    def before_steps(self, run: Run) -> None:
        run.save()  # so that there is a checkpoint to go back to

    def on_diverged(self, run: Run, failure: Diverged) -> bool:
        done, from_step = int(run.state.rollbacks.numpy()), run.step
        if done >= MOST_ROLLBACKS:
            failure.args = (f"{failure}; the run went back {MOST_ROLLBACKS} times before",)
            return False
        factor = run.progress.rate_factor * RATE_FACTOR
        with run.aside("restart"):
            path = run.go_back(failure.weights_step)
        if path is None:
            return False
        run.state.rollbacks.assign(done + 1)
        run.progress.rate_factor = factor
        # Without DIVERGED, at which the launcher would not restart the run.
        reason = str(failure).partition(";")[0].removeprefix(DIVERGED).removeprefix(" with ").removeprefix(": ")
        run.warn(
            f"{reason}: rollback {done + 1} of {MOST_ROLLBACKS} from step {from_step} to {path.name}; "
            f"the learning rate is {factor:g} times the schedule's from here on"
        )
        run.reporter.mark("rollback", step=run.step)
        run.record("rollback", step=run.step, from_step=from_step, learning_rate_factor=factor)
        run.tell("on_rollback")
        return True
