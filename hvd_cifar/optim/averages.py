"""Averages of the weights over the steps: exponential moving averages, and look-ahead."""

from __future__ import annotations

import keras
import tensorflow as tf


class _Averages:
    """A value for each of some variables, which begins as the variable's, and a counter of steps."""

    def __init__(self, variables: list[keras.Variable], name: str, counter: str) -> None:
        self.sources = variables
        self.steps = keras.Variable(0, dtype="int64", trainable=False, name=counter)
        self.values = [
            keras.Variable(v.numpy(), dtype=v.dtype, trainable=False, name=f"{name}_{i}")
            for i, v in enumerate(variables)
        ]
        self.variables = [self.steps, *self.values]  # what has to be saved, restored and broadcast


class MovingAverage(_Averages):
    """Exponential moving averages of variables, as TensorFlow's tutorial keeps them for evaluation.

    average <- d * average + (1 - d) * value, with d = min(decay, (1 + n) / (10 + n)) after n updates: d is small at
    first, so that early averages forget the initial weights (tf.train.ExponentialMovingAverage with num_updates).
    """

    def __init__(self, variables: list[keras.Variable], decay: float) -> None:
        super().__init__(variables, "ema", "ema_updates")
        self.decay = decay

    def update(self) -> None:
        """Update the averages with the variables' current values. Works in a graph."""
        self.steps.assign_add(1)
        n = tf.cast(self.steps.value, tf.float64)
        rest = 1.0 - tf.minimum(tf.constant(self.decay, tf.float64), (1.0 + n) / (10.0 + n))
        for average, source in zip(self.values, self.sources, strict=True):
            average.value.assign_sub((average.value - source.value) * tf.cast(rest, average.dtype))

    def swap(self) -> None:
        """Exchange the variables with their averages; a second call restores both."""
        for average, source in zip(self.values, self.sources, strict=True):
            kept = source.numpy()
            source.assign(average.value)
            average.assign(kept)


class Lookahead(_Averages):
    """Slow weights that move towards the fast ones every 5 steps; the fast ones are then reset to them.

    After every 5 steps: slow <- d slow + (1 - d) fast, then fast <- slow, with d = 0.95^5 (t / T)^3 after t of T steps;
    after the last step fast <- slow. d grows with t: late slow weights average over more steps than early ones.
    A run of fewer than 5 steps keeps its fast weights.

    Source: Zhang et al., "Lookahead optimizer: k steps forward, 1 step back", 2019; the decay is from Jordan 2024,
    section 3.4.
    """

    EVERY = 5  # steps

    def __init__(self, variables: list[keras.Variable], total_steps: int) -> None:
        super().__init__(variables, "slow", "lookahead_steps")
        self.total_steps = total_steps

    def update(self) -> None:
        """Count a step; mix slow and fast weights after every fifth one; end with the slow ones. Works in a graph."""
        self.steps.assign_add(1)
        done = self.steps.value
        decay = 0.95**self.EVERY * (tf.cast(done, tf.float64) / self.total_steps) ** 3

        def mix() -> None:
            for slow, fast in zip(self.values, self.sources, strict=True):
                slow.value.assign_add((fast.value - slow.value) * tf.cast(1.0 - decay, slow.dtype))
            self._copy_slow_weights()

        tf.cond(done % self.EVERY == 0, mix, lambda: None)
        if self.total_steps >= self.EVERY:  # before, the slow weights are the initial ones
            tf.cond(done == self.total_steps, self._copy_slow_weights, lambda: None)

    def _copy_slow_weights(self) -> None:
        for slow, fast in zip(self.values, self.sources, strict=True):
            fast.value.assign(slow.value)
