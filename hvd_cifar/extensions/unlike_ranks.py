"""Unlike ranks: updates that round differently on them, and the variables that they take from rank 0 instead.

All ranks apply the same summed gradients. An optimizer such as SGD or Adam computes each value of a weight from that
value's own gradient, with the same bits on processors of one kind (x86, ARM, GPU). A norm or a product of matrices adds
many values. How these sums are divided depends on the number of threads and on the processor, and so do their last
bits. Without a remedy the weights of unlike ranks would drift apart.
"""

from __future__ import annotations

from typing import Any

from hvd_cifar.training.callbacks import Callback, Run, StepObserver

# Keras's optimizers that compute each value of a weight from that value's own gradient.
ONE_BY_ONE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")


def make(run: Run) -> Callback | None:
    return UnlikeRanks() if run.world.size > 1 else None


class UnlikeRanks(Callback, StepObserver):
    """Has the step of unlike ranks end with rank 0's values where they round differently."""

    def on_build(self, run: Run) -> None:
        from hvd_cifar.runtime.ranks import unlike_hardware

        named = unlike_hardware(run.world.ranks)
        if not named:
            return
        same_kind = len({rank.kind for rank in run.world.ranks}) == 1
        if run.settings.virtual_shards:
            run.say(f"note: --virtual-shards gives the same bits only on ranks that are alike: {named}")
        if variables := rounded_differently(run, same_kind):
            megabytes = sum(v.value.shape.num_elements() * v.value.dtype.size for v in variables) / 1e6
            run.say(
                f"unlike ranks round the update differently, so all take rank 0's ({megabytes:.1f} MB a step): {named}"
            )
            self.variables, self.waits = variables, run.progress.waits
            run.observe(self)

    def after_update(self) -> None:
        from hvd_cifar.distributed.collectives import broadcast_variables
        from hvd_cifar.training.step import values_of

        self.waits.on_gradients(values_of(self.variables))
        broadcast_variables(self.variables)
        self.waits.on_sums(values_of(self.variables))


def rounded_differently(run: Run, same_kind: bool) -> list[Any]:
    """The variables whose last bits depend on the hardware; `same_kind`: all ranks have the same kind of processor."""
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed.optimizer import inner_of, reduction_of
    from hvd_cifar.optim.muon import Muon

    model, optimizer = run.model, run.optimizer
    spectral = [one for one in model._flatten_layers() if isinstance(one, keras.layers.SpectralNormalization)]
    inner = inner_of(optimizer)
    own = type(inner).__bases__[-1] if reduction_of(inner) else type(inner)  # its class before `DistributedOptimizer`
    kinds = tuple(getattr(keras.optimizers, name) for name in ONE_BY_ONE)
    clips = inner.clipnorm is not None or inner.global_clipnorm is not None  # --clip-norm also
    all_differs = clips or not same_kind
    constrained = any(v.constraint is not None for v in model.trainable_variables)
    if own in kinds and not (all_differs or spectral or constrained):
        return []
    variables = [*model.trainable_variables, *(v for layer in spectral for v in layer.non_trainable_variables)]
    if all_differs or own is not Muon:  # Muon computes its velocities one by one
        variables += [v for v in optimizer.variables if tf.as_dtype(v.dtype).is_floating]
    return variables
