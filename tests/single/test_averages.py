"""Averages over steps, against their formulas."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.optim.averages import Lookahead


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
