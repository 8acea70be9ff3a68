"""The forms of the step that are meant for GPUs compute what the product's step does, and keep its bits on 2 ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow  # the forms are the benchmark's, not the product's
STEPS = 4  # the form with several steps in one call makes as many
RECIPES = ("sgd", "muon")
OF_MUON = ("no switch", "flat update", "one buffer", "all")  # whose update is another than with SGD


def _net(precision: str) -> Any:
    """Two kernels of one shape, batch norm, and a net that is traced in a moment."""
    import keras

    from hvd_cifar.models import Net
    from hvd_cifar.models.convolution import QuickConv2D
    from hvd_cifar.models.layers import FusedBatchNormalization, QuickRelu
    from hvd_cifar.training.plan import set_precision

    set_precision(precision, 0)
    x = images = keras.Input((6, 6, 4))
    for name in ("a", "b"):
        x = QuickConv2D(4, 3, padding="same", use_bias=False, name=name)(x)
        x = QuickRelu(name=f"{name}_relu")(FusedBatchNormalization(name=f"{name}_norm")(x))
    model = keras.Model(images, keras.layers.Dense(3, name="logits")(keras.layers.Flatten()(x)))
    return Net(model, [v for v in model.trainable_variables if v.path.endswith("kernel")])


def trained(precision: str, shards: int | None) -> dict[str, dict[str, Any]]:
    """By recipe and form: digest of the weights after 4 steps, distance from those of the product's step, and loss."""
    from dataclasses import replace

    import horovod.tensorflow as hvd
    import tensorflow as tf

    from benchmarks.gpu.variants import FORMS, Step, staged
    from hvd_cifar.data.pipeline import MicroBatch
    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.distributed.reduction import Reduction
    from hvd_cifar.models import resnet
    from hvd_cifar.optim.averages import Lookahead, MovingAverage
    from hvd_cifar.training.step import Averaging, StepSpec, make_train_step

    hvd.init()
    draw = np.random.default_rng(1)
    count = 8
    data = draw.standard_normal((count, 6, 6, 4)), draw.integers(0, 3, count), np.ones(count)
    parts = shards or hvd.size()
    mine = range(hvd.rank() * parts // hvd.size(), (hvd.rank() + 1) * parts // hvd.size())
    batches = [
        [tf.constant(v[i::parts], t) for v, t in zip(data, ("float32", "int32", "float32"), strict=True)] for i in mine
    ]
    more: dict[str, Any] = {"ema_decay": 0.9, "lookahead": True, "label_smoothing": 0.1}
    recipes = {"sgd": replace(resnet.RECIPE, **more), "muon": replace(resnet.LARGE, weight_decay=1e-3, **more)}
    found: dict[str, dict[str, Any]] = {}
    for kind in RECIPES:
        recipe, net = recipes[kind], _net(precision)
        begin = [v.numpy() for v in net.model.trainable_variables]
        optimizer = DistributedOptimizer(recipe.optimizer(0.1), op="sum", fixed_order=bool(shards))
        optimizer.build(net.model.trainable_variables)
        weights = net.model.trainable_variables
        averages = [Averaging(Lookahead(weights, 1000)), Averaging(MovingAverage(weights, 0.9))]
        spec = StepSpec((6, 6, 4), recipe.weight_decay, 0.1, len(batches), shards)
        plain = make_train_step(net, optimizer, spec, averages)

        given = [MicroBatch._make([*batch, tf.range(batch[1].shape[0])]) for batch in batches]
        losses = [plain(given, tf.constant(count), 0.1, tf.zeros([0]))[0] for _ in range(STEPS)]
        right = [v.numpy() for v in weights]
        found[kind] = {"product": [_digest(right), 0.0, float(losses[-1])]}
        for name, switches in FORMS.items():
            if kind == "muon" and name not in OF_MUON:
                continue
            net = _net(precision)
            for v, value in zip(net.model.trainable_variables, begin, strict=True):
                v.assign(value)
            step = Step(net, recipe, switches, 0.1, shards, Reduction(average=False, fixed_order=bool(shards)))
            with step.settings():
                for _ in range(STEPS // switches.steps):
                    loss = step(staged(batches, switches.steps), tf.constant(count))
            apart = max(float(np.abs(a - b).max()) for a, b in zip(step.values(), right, strict=True))
            found[kind][name] = [_digest(step.values()), apart, float(loss)]
    return found


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def test_every_form_is_the_products_step_up_to_rounding_and_keeps_its_bits_on_two_ranks() -> None:
    (one,), two = run_ranks(trained, 1, "float64", 2, timeout=600), run_ranks(trained, 2, "float64", 2, timeout=600)
    assert two[0] == two[1]
    for kind in RECIPES:
        for name, (digest, apart, loss) in one[kind].items():
            assert digest == two[0][kind][name][0], name
            assert apart < 1e-12 and loss == pytest.approx(one[kind]["product"][2], rel=1e-12), name
