"""Data-parallel training on one page: `./run.sh -np 2 python examples/minimal.py`.

One process (rank) per GPU, or per core. Every rank computes the gradients of its own shard of each batch, an
all-reduce averages them, and all ranks make the same update, so their weights stay the same.
"""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_cifar import DistributedOptimizer, broadcast_variables

BATCH = 64  # examples of each rank

# 1. Start Horovod, and pin this rank's device before TensorFlow touches any.
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
else:
    tf.config.threading.set_intra_op_parallelism_threads(1)

# 2. Every rank reads its shard: example i belongs to rank i modulo the number of ranks. The seed is the same on all.
generator = np.random.default_rng(0)
labels = generator.integers(0, 10, 8192).astype(np.int32)
images = generator.normal(size=(8192, 16, 16, 1)).astype(np.float32)
images[np.arange(8192), labels] += 1.0  # row number `label` is brighter
shard = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
batches = shard.shuffle(8192, seed=1).batch(BATCH, drop_remainder=True).repeat()

# 3. Wrap the optimizer. The batch of a step is that of all ranks together, and the learning rate grows with it.
model = keras.Sequential([keras.Input((16, 16, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.02 * hvd.size()))
optimizer.build(model.trainable_variables)

# 4. Start from rank 0's weights on all ranks.
broadcast_variables(model)
broadcast_variables(optimizer)


@tf.function
def step(image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
    """One update; the mean loss of this rank's batch."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, model(image, training=True)))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)  # averaged over all ranks, then applied
    return loss


# 5. Train: every rank makes the same number of steps.
for number, (image, label) in enumerate(batches.take(200), start=1):
    loss = step(image, label)
    if number % 50 == 0:
        mean = float(hvd.allreduce(loss, op=hvd.Average))  # every rank must call this, or the others wait for ever
        if hvd.rank() == 0:
            print(f"step {number}, loss {mean:.4f} over {hvd.size()} ranks", flush=True)
