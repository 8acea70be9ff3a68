"""Keras's LossScaleOptimizer around a `DistributedOptimizer`: all ranks skip a step, or none does."""

from __future__ import annotations

from typing import Any

import keras


def ask_all_ranks() -> None:
    """Make Keras's LossScaleOptimizer ask all ranks whether gradients are finite, and refuse to be copied.

    Keras checks this rank's gradients alone. A rank whose gradients are not finite then skips the inner `apply` and its
    all-reduce, and the other ranks wait for it for ever. The class itself is changed, not a subclass, since `compile`
    makes a LossScaleOptimizer under mixed_float16. Around any other optimizer it behaves as before.
    """
    loss_scale = keras.optimizers.LossScaleOptimizer
    local_check, own_reduce = loss_scale.check_finite, loss_scale.__reduce__
    if getattr(local_check, "asks_all_ranks", False):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = local_check(self, grads)
        ask = getattr(self.inner_optimizer, "on_all_ranks", None)
        return ask(finite) if ask else finite

    def reduce(self: Any) -> Any:
        inner = self.inner_optimizer
        return inner.__reduce__() if hasattr(inner, "on_all_ranks") else own_reduce(self)

    check_finite.asks_all_ranks = True  # type: ignore[attr-defined]
    loss_scale.check_finite = check_finite
    loss_scale.__reduce__ = reduce
