"""`fit` that goes on when a rank is lost: `horovodrun --gloo -np 2 --min-np 1 --host-discovery-script S python F`.

S prints a line HOST:SLOTS for each present host, such as localhost:1 and 127.0.0.1:1, and F is this file. With an
argument rank 1 kills itself once.
"""

import os
import signal
import sys

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
inputs = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
targets = inputs.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")


class Dies(keras.callbacks.Callback):
    """Kills rank 1 at the start of the third epoch, where the program has an argument."""

    def on_epoch_begin(self, epoch, logs=None):
        if len(sys.argv) > 1 and hvd.rank() == 1 and state.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    shard = slice(hvd.rank(), None, hvd.size())
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        Dies(),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
    ]
    options = {"batch_size": 32, "epochs": 5 - state.epoch, "callbacks": callbacks, "verbose": 0}
    model.fit(inputs[shard], targets[shard], **options)


state = hvd.elastic.KerasState(model, epoch=0)
state.register_reset_callbacks([lambda: print(f"goes on at epoch {state.epoch} with {hvd.size()} ranks", flush=True)])
train(state)
print(f"rank {hvd.rank()} of {hvd.size()} ends after {state.epoch} epochs", flush=True)
report(model)
