"""`SyncBatchNormalization`: batch normalisation with the statistics of the global batch.

Horovod's own layer is made for Keras 2 and does not run under Keras 3.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_cifar.distributed import collectives
from hvd_cifar.models.normalization import FusedBatchNormalization, present


class SyncBatchNormalization(FusedBatchNormalization):
    """Batch normalisation over [b, h, w, c] by the mean and variance of all ranks' images together.

    Every rank adds up its images, their squares and their number, and one all-reduce of 2 c + 1 numbers turns these
    into the sums of the global batch; its gradient is an all-reduce too, since each rank's images move the loss of all
    others. What ranks of unequal batches compute is therefore what one rank with all images would. Every rank has to
    call the layer equally often: with `training`, it is a collective.

    Sums are taken of the distance to the moving mean, which is the same on all ranks: the variance is then a difference
    of small numbers (Chan, Golub, LeVeque 1983, "shifted data"). Weights, saved form and behaviour in evaluation are
    those of `FusedBatchNormalization`.
    """

    def call(self, images: Any, training: bool = False) -> Any:
        """[b, h, w, c] -> the same shape and type; `training` uses and gathers the global batch's statistics."""
        if not training:
            return super().call(images, training=False)
        real = tf.convert_to_tensor(self.gamma).dtype
        channels = images.shape[-1]
        shift = tf.convert_to_tensor(self.moving_mean)
        shifted = tf.cast(images, real) - shift
        own = tf.reduce_sum(shifted, [0, 1, 2]), tf.reduce_sum(tf.square(shifted), [0, 1, 2])
        count = tf.cast(tf.reshape(tf.size(images) // channels, [1]), real)
        # Horovod: sums and counts, which make no difference between equal and unequal batches.
        sums = collectives.all_reduce_in_graph(tf.concat([*own, count], axis=0) * tf.cast(present(), real))
        total = tf.maximum(sums[-1], 1.0)  # 0 where no rank has an example of this slice
        mean = sums[:channels] / total  # of the distances
        variance = tf.maximum(sums[channels:-1] / total - tf.square(mean), 0.0)
        step = (1.0 - self.momentum) * tf.minimum(sums[-1], 1.0)  # from no example nothing is learnt
        self.moving_mean.assign(shift + step * mean)
        unbiased = variance * total / tf.maximum(total - 1.0, 1.0)
        self.moving_variance.assign(self.moving_variance + step * (unbiased - self.moving_variance))
        scale = tf.convert_to_tensor(self.gamma) * tf.math.rsqrt(variance + self.epsilon)
        return tf.cast((shifted - mean) * scale + tf.convert_to_tensor(self.beta), images.dtype)
