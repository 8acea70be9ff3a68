"""Small nets for tests of Horovod's names: their data, and their weights after a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

STEPS, BATCH = 4, 12  # global batches, each of which 1, 2 and 3 ranks share equally
WORDS = 7


def start() -> Any:
    import horovod.tensorflow as hvd

    from hvd_cifar.runtime import world

    world.start()
    return hvd


def net(sparse: bool = False, seed: int = 1, layer: Any = None) -> Any:
    """A net of 3 inputs, or of 3 words, with one output."""
    import keras

    keras.utils.set_random_seed(seed)
    if sparse:
        first = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(WORDS, 2), keras.layers.Flatten()]
    else:
        first = [keras.Input((3,)), keras.layers.Dense(4, "tanh")]
    return keras.Sequential([*first, *([layer] if layer else []), keras.layers.Dense(1)])


def data(sparse: bool = False) -> tuple[Any, Any]:
    """Inputs and targets, [STEPS, BATCH, ...]. The ranks' shards differ, and words occur several times."""
    draw = np.random.default_rng(3)
    shape = (STEPS, BATCH, 3)
    x = draw.integers(0, WORDS, shape).astype("int32") if sparse else draw.normal(size=shape).astype("float32")
    return x, draw.normal(size=(STEPS, BATCH, 1)).astype("float32")


def flat(model: Any) -> list[float]:
    return np.concatenate([np.ravel(w) for w in model.get_weights()]).tolist()


def as_it_is(tape: Any) -> Any:
    return tape


class Dense:
    """A tape whose gradients are dense."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape

    def gradient(self, loss: Any, variables: Any) -> list[Any]:
        import tensorflow as tf

        return [tf.convert_to_tensor(g) for g in self.tape.gradient(loss, variables)]


def train(
    model: Any,
    optimizer: Any,
    shard: Any = slice(None),
    *,
    sparse: bool = False,
    graph: bool = True,
    tape: Callable[..., Any] = as_it_is,
    scale: float = 1.0,
    passes: int = 1,
) -> list[float]:
    """Weights after a step on this shard of each batch, or on each of `passes` parts of it."""
    import keras
    import tensorflow as tf

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as inner:
            loss = scale * tf.reduce_mean((model(x, training=True) - y) ** 2)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                loss = optimizer.scale_loss(loss)
        gradients = tape(inner).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    call = tf.function(step) if graph else step
    for x, y in zip(*data(sparse), strict=True):
        for part in range(passes):
            call(tf.constant(x[shard][part::passes]), tf.constant(y[shard][part::passes]))
    return flat(model)
