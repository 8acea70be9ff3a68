"""A loop with `DistributedGradientTape`: `./run.sh -np 2 python examples/horovod/tape.py`."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
generator = np.random.default_rng(hvd.rank())  # each rank has examples of its own
model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(1)])
optimizer = tf.optimizers.Adam(0.01 * hvd.size())


@tf.function
def step(x, y, first):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first:  # after the first step, when the optimizer has its variables
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    return loss


for number in range(50):
    x = generator.normal(size=(32, 8)).astype("float32")
    loss = step(tf.constant(x), tf.constant(x.sum(axis=1, keepdims=True)), number == 0)
mean = hvd.allreduce(loss)
if hvd.rank() == 0:
    print(f"loss {float(mean):.3f}")
report(model)
