"""A callback of your own: `./run.sh -np 2 train --callbacks examples/my_callback.py:BestStep`."""

from hvd_cifar import Callback, Evaluation, Run


class BestStep(Callback):
    """Prints the best accuracy at the end, of the part that is evaluated: test, or validation with --hold-out."""

    best = (0.0, 0)  # accuracy, step

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.part == run.watched:  # with --hold-out the last evaluation is of the test set
            self.best = max(self.best, (evaluation.accuracy, evaluation.step))

    def on_end(self, run: Run) -> None:
        if run.world.rank == 0:
            accuracy, step = self.best
            print(f"best {run.watched} accuracy: {accuracy:.2%} at step {step}", flush=True)
