"""A net of all ranks, and one of a process set, rank 0: `./run.sh -np 2 python examples/horovod/process_set.py`."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from same_weights import report

first = hvd.ProcessSet([0])
hvd.init(process_sets=[first])
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
tf.random.set_seed(hvd.rank())
layers = keras.layers
shared = keras.Sequential([keras.Input((4,)), layers.Dense(4)])  # trained by all ranks
alone = keras.Sequential([keras.Input((4,)), layers.Dense(1)])  # by rank 0; the others train theirs by themselves
for model, ranks in ((shared, hvd.global_process_set), (alone, first)):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=ranks)
    optimizer.build(model.trainable_variables)
    if ranks.included():
        hvd.broadcast_variables(model.variables, root_rank=0, process_set=ranks)
    for _ in range(20):
        x = tf.random.normal((16, 4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - tf.reduce_sum(x, axis=1, keepdims=True)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
report(shared)
