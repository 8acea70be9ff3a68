"""A frozen base, and a head of each rank's own: `./run.sh -np 2 python examples/horovod/frozen.py`."""

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
generator = np.random.default_rng(hvd.rank())
inputs = generator.normal(size=(256, 8)).astype("float32")
base = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu")])
base.trainable = False
shared, own = keras.layers.Dense(4), keras.layers.Dense(1)
model = keras.Sequential([keras.Input((8,)), base, shared, own])
before = base.get_weights()

optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.01), local_layers=[own])
model.compile(optimizer, loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own.variables)]
model.fit(inputs, inputs.sum(axis=1, keepdims=True), batch_size=32, epochs=2, callbacks=callbacks, verbose=0)
if hvd.rank() == 0:
    print("frozen:", all((w == b).all() for w, b in zip(base.get_weights(), before, strict=True)))
report(base, shared)  # `own` differs
