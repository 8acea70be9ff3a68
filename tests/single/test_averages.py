"""Averages over steps, against their formulas."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.optim.averages import Lookahead, MovingAverage


def test_lookahead_mixes_every_fifth_step_and_ends_on_the_slow_weights() -> None:
    variable = keras.Variable(np.zeros(2), dtype="float64")
    lookahead = Lookahead([variable], total_steps=12)
    update = tf.function(lookahead.update)
    fast, slow = 0.0, 0.0
    for step in range(1, 13):
        fast += step
        variable.assign_add(np.full(2, float(step)))
        update()
        if step % 5 == 0:
            decay = 0.95**5 * (step / 12) ** 3
            slow = decay * slow + (1 - decay) * fast
            fast = slow
        if step == 12:
            fast = slow
        assert np.allclose(variable.numpy(), fast, rtol=1e-12), step
    assert 0 < slow < sum(range(13))


def test_a_moving_average_begins_with_a_small_decay_and_follows_its_formula() -> None:
    variable = keras.Variable(np.zeros(2), dtype="float64")
    average = MovingAverage([variable], decay=0.5)
    update = tf.function(average.update)
    expected = 0.0
    for n in range(1, 15):
        variable.assign(np.full(2, float(n)))
        update()
        decay = min(0.5, (1 + n) / (10 + n))  # 2/11 at first; 0.5 from n = 8 on
        expected = decay * expected + (1 - decay) * n
        assert np.allclose(average.values[0].numpy(), expected, rtol=1e-12), n


def test_a_second_swap_puts_the_weights_back() -> None:
    variable = keras.Variable(np.full(2, 3.0))
    average = MovingAverage([variable], decay=0.9)
    variable.assign(np.full(2, 7.0))
    average.swap()
    assert (variable.numpy() == 3).all() and (average.values[0].numpy() == 7).all()
    average.swap()
    assert (variable.numpy() == 7).all() and (average.values[0].numpy() == 3).all()
