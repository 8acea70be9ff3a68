"""`fit` with Horovod's callbacks, and a checkpoint on rank 0: `./run.sh -np 2 python examples/horovod/fit.py`."""

import os
import tempfile

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
generator = np.random.default_rng(0)
inputs = generator.normal(size=(1024, 8)).astype("float32")
targets = inputs.sum(axis=1, keepdims=True)
shard = slice(hvd.rank(), None, hvd.size())

rate = 0.02 * hvd.size()
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), compression=hvd.Compression.fp16)
model.compile(optimizer, loss="mse", metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),  # before callbacks that decide by metrics
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=rate, multiplier=0.1, start_epoch=3),
    keras.callbacks.EarlyStopping("loss", patience=2),
]
path = os.path.join(tempfile.gettempdir(), f"horovod-fit-{os.getpid()}.keras")
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(path))
history = model.fit(inputs[shard], targets[shard], batch_size=32, epochs=4, callbacks=callbacks, verbose=0).history

if hvd.rank() == 0:
    loaded = hvd.load_model(path)  # with an optimizer that averages
    print(f"loss {history['loss'][0]:.3f} to {history['loss'][-1]:.3f}, saved {type(loaded.optimizer).__name__}")
    os.remove(path)
report(model)
