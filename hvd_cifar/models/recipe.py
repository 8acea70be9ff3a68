"""`Recipe`: what a model is trained with, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import keras

from hvd_cifar.optim.schedules import Decay, cosine


@dataclass(frozen=True)
class Batch:
    """Which batches a recipe's numbers are for.

    Attributes:
        reference: global batch that the learning rate is for. The rate is scaled by (global batch / reference)^power.
        is_global: whether the default global batch is `reference` on any number of ranks; if not, each rank has 128.
        largest: upper limit of the default global batch, before --gradient-accumulation; None: no limit.
        power: 1 is the linear scaling rule (Goyal et al. 2017, section 2.1); 0.5 scales by the square root.
    """

    reference: int = 128
    is_global: bool = False
    largest: int | None = None
    power: float = 1.0

    def scale_of(self, global_batch_size: int) -> float:
        """The factor of the learning rate for a global batch."""
        return float((global_batch_size / self.reference) ** self.power)


def momentum_sgd(learning_rate: float) -> keras.optimizers.Optimizer:
    """Stochastic gradient descent with momentum 0.9."""
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def is_kernel(variable: Any) -> bool:
    """Whether a variable is a layer's kernel: zero is no better value for others (Goyal et al. 2017, section 5.1)."""
    return str(variable.path).endswith("kernel")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Every field has a default; `train --set NAME=VALUE` changes those that are numbers.

    Attributes:
        optimizer: makes a Keras optimizer from a learning rate.
        learning_rate: after the warm-up, for the global batch `batch.reference`.
        schedule: of the learning rate after the warm-up. A function gets the finished part of the training, from 0 to
            1, and returns a factor.
        batch: which batches the learning rate is for.
        learning_rate_factor: multiplies the learning rate; None: `batch.scale_of`.
        warmup_epochs: epochs over which the learning rate rises to its full value, from `learning_rate` if the global
            batch scales it up, else from 0; None: 1 if it is scaled up, else 0.
        epochs: passes over the training set; the last one may be a part.
        precision: a Keras dtype policy; None: mixed_bfloat16 where every rank's processor or GPU has instructions for
            it, else float32.
        augmentation: "standard": shifts by up to 4 pixels, mirror images. "fast": by 2, mirrored every other epoch.
            Both: random parts, not shifts, of pictures with --image-size from 64 on. "tutorial": crops of 3/4 of each
            side, mirror images, contrast. "none". Or your own `Transforms`. All standardise by the training set's
            channels, "tutorial" each image by itself.
        weight_decay: factor of sum(w^2) / 2 over the variables that `decayed` chooses, in the loss.
        decayed: which trainable variables decay.
        label_smoothing: share of the target spread evenly over all classes.
        ema_decay: decay of the weights' moving average for evaluation; 0: none.
        lookahead: average the weights by look-ahead (`optim.averages.Lookahead`).
        image_scales: factors of at most 1 that images are shrunk by, each for an equal part of the steps; (): as they
            are. The last one should be 1, since evaluation does not shrink images.
        test_time_augmentation: evaluate on six views of each test image at the end.
        evaluation_epochs: epochs between evaluations.
        embedded_epochs: at most this many epochs on the embedded set, which `--dataset auto` takes without CIFAR-10.
        beyond: (n, recipe): the recipe of global batches of more than n examples; None: this one for all.
    """

    optimizer: Callable[[float], keras.optimizers.Optimizer] = momentum_sgd
    learning_rate: float = 0.05
    schedule: Decay = cosine
    batch: Batch = field(default_factory=Batch)
    learning_rate_factor: float | None = None
    warmup_epochs: float | None = None
    epochs: float = 10
    precision: Literal["float32", "float64", "mixed_bfloat16", "mixed_float16"] | None = "float32"
    augmentation: Any = "standard"
    weight_decay: float = 5e-4
    decayed: Callable[[Any], bool] = is_kernel
    label_smoothing: float = 0.0
    ema_decay: float = 0.0
    lookahead: bool = False
    image_scales: tuple[float, ...] = ()
    test_time_augmentation: bool = False
    evaluation_epochs: int = 1
    embedded_epochs: float = 2
    beyond: tuple[int, Recipe] | None = None

    def for_batch(self, global_batch_size: int) -> Recipe:
        """This recipe, or the one of `beyond` for a larger global batch, with this recipe's `batch.largest`."""
        if self.beyond is None or global_batch_size <= self.beyond[0]:
            return self
        larger = self.beyond[1]
        # Another limit would change the batch that the recipe is chosen by.
        batch = replace(larger.batch, largest=self.batch.largest)
        return replace(larger, batch=batch).for_batch(global_batch_size)
