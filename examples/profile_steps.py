"""TensorFlow's profile of steps 4 to 7 on each rank: `train --callbacks examples/profile_steps.py:Profile`."""

import tensorflow as tf

from hvd_cifar import Callback, Run

FIRST, LAST = 4, 7


class Profile(Callback):
    """Each rank writes, on its host, a folder for TensorBoard's profile plugin."""

    def on_step(self, run: Run) -> None:
        if run.step == FIRST - 1:
            run.progress.check_losses()  # waits for the device
            tf.profiler.experimental.start(str(run.run_dir / f"tensorboard/rank-{run.world.rank}"))
        elif run.step == LAST:
            run.progress.check_losses()
            tf.profiler.experimental.stop()
