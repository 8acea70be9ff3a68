"""The tower trainer of TensorFlow's multi-GPU tutorial, on this project's nets and data: an oracle.

    python -m benchmarks.tower --towers 2 --global-batch-size 128 --max-steps 200 --run-dir runs/towers

One process and one graph: the variables are shared; every tower is a copy of the net on a device of its own with its
part of the batch, and computes its own loss (mean cross-entropy of its part, plus the whole weight decay) and its
gradients; these are averaged and applied once. All of it is as in cifar10_multi_gpu_train.py of TensorFlow's tutorial,
its ExponentialMovingAverage included. Nothing here comes from this project's step or distributed rooms. Towers are GPUs
where there are enough, else CPU devices of this process, as many as asked for.

The parts are those that ranks would get, so towers of equal parts end with the weights of as many ranks. Where the
towers do not divide the batch, the tutorial's average of means gives examples of smaller parts more weight; ranks do
not. Nets with batch norm update one set of moving statistics, tower after tower.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import keras
import numpy as np
import tensorflow as tf

from benchmarks import setting
from hvd_cifar import config
from hvd_cifar.config import TrainSettings
from hvd_cifar.data.host_files import Onlooker
from hvd_cifar.data.pipeline import training_batches
from hvd_cifar.data.sampler import Sampler
from hvd_cifar.data.source import prepare
from hvd_cifar.errors import UserError
from hvd_cifar.models import BUILT_IN, Net
from hvd_cifar.models.recipe import momentum_sgd
from hvd_cifar.training import checkpoint
from hvd_cifar.training.plan import changed, global_batch, make_schedule, resolve
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.work import Work, make_net, work_of


def towers_of(count: int) -> list[str]:
    """Devices for a number of towers, by name. Call it before any TensorFlow operation."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) >= count:
        return [f"/GPU:{i}" for i in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"/CPU:{i}" for i in range(count)]


def _make_step(work: Work, net: Net, devices: Sequence[str], rate: float, step: Any, averages: Any) -> Any:
    """The step (parts of the batch, learning rate) -> each tower's loss."""
    model, variables = net.model, net.model.trainable_variables
    optimizer = work.recipe.optimizer(rate)
    optimizer.global_clipnorm = work.settings.clip_norm
    optimizer.build(variables)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def tower_loss(image: Any, label: Any) -> Any:
        loss = cross_entropy(label, model(image, training=True))
        decay = [tf.nn.l2_loss(v.value) * work.recipe.weight_decay for v in net.decayed]
        return tf.add_n([loss, *(tf.cast(term, loss.dtype) for term in decay)])

    @tf.function(reduce_retracing=True)
    def train_step(parts: Sequence[tuple[Any, Any]], learning_rate: Any) -> Any:
        losses, gradients = [], []
        for device, (image, label) in zip(devices, parts, strict=True):
            with tf.device(device):
                with tf.GradientTape() as tape:
                    losses.append(tower_loss(image, label))
                gradients.append(tape.gradient(losses[-1], [v.value for v in variables]))
        averaged = [tf.reduce_mean(tf.stack(of_towers), axis=0) for of_towers in zip(*gradients, strict=True)]
        optimizer.learning_rate.assign(learning_rate)
        optimizer.apply(averaged, variables)
        step.assign_add(1)
        if averages is not None:
            averages.apply([v.value for v in variables])
        return tf.stack(losses)

    return train_step


def train(settings: TrainSettings, towers: int, nudge: bool) -> None:
    """Train; the run directory gets metrics.jsonl, with every tower's loss, and a checkpoint of the model at the end.

    `nudge`: move one value of the first variable by its last bit before training, to see how far the runs differ.
    """
    base = BUILT_IN[settings.model].recipe
    assert base is not None
    recipe = changed(base.for_batch(global_batch(settings, base.batch, towers)), settings)
    if settings.model == "fast" or recipe.optimizer not in (keras.optimizers.SGD, momentum_sgd):
        raise UserError(
            f"--model {settings.model}: towers train with the tutorial's step, which knows nothing of Muon; give "
            "another, or a smaller batch"
        )
    devices = towers_of(towers)
    source, folder = prepare(settings, Onlooker(is_warned=click.echo))
    dataset = source.read(folder)
    model = replace(BUILT_IN[settings.model], recipe=recipe)
    work = work_of(resolve(settings, recipe), dataset, model, 0, towers)
    settings, batch_plan, transforms = work.settings, work.plan, work.transforms
    schedule = make_schedule(settings, work.recipe, batch_plan)
    net = make_net(work)
    model, variables = net.model, net.model.trainable_variables
    if nudge:
        value = variables[0].numpy()
        value.flat[0] = np.nextafter(value.flat[0], np.inf)
        variables[0].assign(value)

    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    averages = tf.train.ExponentialMovingAverage(work.recipe.ema_decay, step) if work.recipe.ema_decay else None
    train_step = _make_step(work, net, devices, schedule(0), step, averages)
    if averages is not None:
        averages.apply([v.value for v in variables])  # outside the graph, since it makes variables
    order = len(dataset.train), batch_plan.global_batch_size, settings.seed
    samplers = [Sampler(*order, tower, towers) for tower in range(towers)]
    last = batch_plan.total_steps
    parts = [training_batches(dataset.train, transforms, s, first_step=0, last_step=last) for s in samplers]
    assert settings.run_dir is not None
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    real = "float64" if settings.precision == "float64" else "float32"
    with (settings.run_dir / "metrics.jsonl").open("w", buffering=1) as metrics:  # a line as soon as it is known
        for done, of_towers in enumerate(zip(*parts, strict=True)):
            rate = tf.constant(schedule(done), real)
            losses = train_step([(image, label) for image, label, *_ in of_towers], rate).numpy()
            event = {"event": "train", "step": done + 1, "loss": float(losses.mean()), "towers": losses.tolist()}
            metrics.write(json.dumps(event) + "\n")
    state = TrainState(model)
    if averages is not None:
        state.add("averages", [step, *(averages.average(v.value) for v in variables)], core=True)
    folder = settings.run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    checkpoint.write(folder, batch_plan.total_steps, checkpoint.values_of(state))
    print(f"{towers} towers, {batch_plan.total_steps} steps, last loss {losses.mean():.6f}: {settings.run_dir}")


def _as_in_train(*names: str) -> Callable[[Any], Any]:
    """Options of a command."""
    return lambda command: functools.reduce(lambda made, name: click.option(f"--{name}")(made), names, command)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--towers", default=1, show_default=True, type=click.IntRange(1), help="Copies of the net.")
@click.option("--nudge", is_flag=True, help="Move one initial weight by its last bit.")
@click.option("--model", default="tutorial", help="As in train, like the other options.")
@_as_in_train("dataset", "data-dir", "global-batch-size", "learning-rate", "epochs", "max-steps", "precision", "seed")
@click.option("--set", multiple=True)
@click.option("--run-dir", required=True, type=Path)
@setting.one_line_for_users()
def main(towers: int, nudge: bool, **given: Any) -> None:
    """Parse, then train."""
    values = {name: value for name, value in given.items() if value not in (None, ())}
    train(config.make(TrainSettings, values), towers, nudge)


if __name__ == "__main__":
    main()
