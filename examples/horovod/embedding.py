"""Sparse gradients of an embedding: `./run.sh -np 2 python examples/horovod/embedding.py`."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
generator = np.random.default_rng(hvd.rank())
words = generator.integers(0, 1000, (512, 10))
labels = (words.sum(axis=1, keepdims=True) % 2).astype("float32")
model = keras.Sequential(
    [keras.Input((10,), dtype="int32"), keras.layers.Embedding(1000, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
)
# Ranks gather the rows of all; sparse_as_dense=True adds whole tables instead.
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
loss = model.fit(words, labels, batch_size=32, epochs=3, callbacks=callbacks, verbose=0).history["loss"]
if hvd.rank() == 0:
    print(f"loss {loss[0]:.3f} to {loss[-1]:.3f}")
report(model)
