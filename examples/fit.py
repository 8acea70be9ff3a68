"""Keras's own `fit` on several ranks: `./run.sh -np 2 python examples/fit.py`."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_cifar import DistributedOptimizer, broadcast_variables

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # each rank has a GPU of its own
generator = np.random.default_rng(0)
inputs = generator.normal(size=(4096, 32)).astype(np.float32)
targets = inputs @ generator.normal(size=(32, 1)).astype(np.float32)
shard = slice(hvd.rank(), None, hvd.size())  # each rank learns from examples of its own

model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))  # gradients are averaged over all ranks
model.compile(optimizer, loss="mse")
broadcast_variables(model)  # every rank starts from rank 0's weights
history = model.fit(inputs[shard], targets[shard], batch_size=64, epochs=8, verbose=2 if hvd.rank() == 0 else 0)

weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
same = bool((hvd.allgather(weights[None, :]).numpy() == weights).all())
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, loss {history.history['loss'][-1]:.4f}, same weights on all ranks: {same}", flush=True)
