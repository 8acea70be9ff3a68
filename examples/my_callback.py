"""A callback of your own: `./run.sh -np 2 train --callbacks examples/my_callback.py:BestStep`."""

from hvd_cifar import Callback, Evaluation, Run


class BestStep(Callback):
    """Prints the best test accuracy at the end."""

    best = (0.0, 0)  # accuracy, step

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self.best = max(self.best, (evaluation.accuracy, evaluation.step))

    def on_end(self, run: Run) -> None:
        if run.world.rank == 0:
            accuracy, step = self.best
            print(f"best test accuracy: {accuracy:.2%} at step {step}", flush=True)
