"""Gradients of several batches in one message: `./run.sh -np 2 python examples/horovod/accumulation.py`."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
inputs = np.random.default_rng(hvd.rank()).normal(size=(512, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
options = {"backward_passes_per_step": 4, "average_aggregated_gradients": True}
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
model.compile(optimizer, loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(inputs, inputs.sum(axis=1, keepdims=True), batch_size=16, epochs=2, callbacks=callbacks, verbose=0)
if hvd.rank() == 0:
    print(f"{int(optimizer.iterations.numpy())} batches, an update every 4")
report(model)
