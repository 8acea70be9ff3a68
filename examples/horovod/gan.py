"""Two optimizers in one step: `./run.sh -np 2 python examples/horovod/gan.py`."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from same_weights import report

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # one GPU a rank; none on CPUs
tf.random.set_seed(hvd.rank())
layers = keras.layers
generator = keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(2)])
critic = keras.Sequential([keras.Input((2,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
of_generator = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
of_critic = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
entropy = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def step(real):
    noise = tf.random.normal((len(real), 4))
    with tf.GradientTape(persistent=True) as tape:
        fake = generator(noise, training=True)
        said_real, said_fake = critic(real, training=True), critic(fake, training=True)
        critic_loss = entropy(tf.ones_like(said_real), said_real) + entropy(tf.zeros_like(said_fake), said_fake)
        generator_loss = entropy(tf.ones_like(said_fake), said_fake)
    for loss, model, optimizer in ((critic_loss, critic, of_critic), (generator_loss, generator, of_generator)):
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for model in (generator, critic):
    hvd.broadcast_variables(model.variables, root_rank=0)
for _ in range(20):
    step(tf.random.normal((16, 2)) + 3.0)
report(generator, critic)
