"""Half types inside XLA: widened once, rounded once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def widen(x: Any) -> Any:
    """Half types as float32, others unchanged: XLA would round a half type after every operation."""
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def narrow(x: Any, dtype: Any) -> Any:
    """float32 -> `dtype`, rounded to nearest, ties to even: `tf.cast`, in less time for bfloat16 under XLA.

    bfloat16 is the upper half of float32, so rounding is one integer addition. XLA's own cast also handles NaNs whose
    carry would reach the sign bit; arithmetic makes no such NaN.
    """
    return _rounded(x) if dtype == tf.bfloat16 and x.dtype == tf.float32 else tf.cast(x, dtype)


@tf.custom_gradient  # TensorFlow sees none through integers: second derivatives would be zero
def _rounded(x: Any) -> tuple[Any, Any]:
    bits = tf.bitcast(x, tf.uint32)
    half = tf.constant(16, tf.uint32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, half), tf.constant(1, tf.uint32))
    rounded = tf.bitwise.right_shift(bits + tf.constant(0x7FFF, tf.uint32) + odd, half)
    return tf.bitcast(tf.cast(rounded, tf.uint16), tf.bfloat16), lambda upstream: tf.cast(upstream, tf.float32)
