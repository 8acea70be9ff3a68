"""The step of `train`, and its input pipeline, on this device; `python -m benchmarks.gpu` starts it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import tensorflow as tf

from benchmarks import nets
from benchmarks.gpu.serve import LEAD_IN, serve
from benchmarks.gpu.steps import PIPELINE
from hvd_cifar.data.augment import transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import MicroBatch, training_batches
from hvd_cifar.data.sampler import Sampler
from hvd_cifar.distributed import DistributedOptimizer
from hvd_cifar.files import replace_text
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.runtime.world import start
from hvd_cifar.training.step import Averaging, StepSpec, make_train_step

IMAGES = 10_240  # of the pipeline
RATE = 1e-3  # weights stay finite in many steps on one batch
TOTAL = 10**6  # steps, which no measurement reaches


def steps_of(model: str, precision: str, examples: int, device: str) -> Callable[[int], None]:
    """What repeats the step of `train`, on random images on the device."""
    side = 24 if model == "tutorial" else 32
    net, recipe, draw = nets.build(model, side, precision), nets.recipe_of(model), np.random.default_rng(0)
    weights = net.model.trainable_variables
    with tf.device(device):
        images = tf.constant(draw.standard_normal((examples, side, side, 3)), tf.float32)
        labels = tf.constant(draw.integers(0, 10, examples), tf.int32)
        batch = MicroBatch(images, labels, tf.ones(examples), tf.range(examples))
        optimizer = DistributedOptimizer(recipe.optimizer(RATE), op="sum")
        optimizer.build(weights)
        averages: list[Any] = [Lookahead(weights, TOTAL)] if recipe.lookahead else []
        averages += [MovingAverage(weights, recipe.ema_decay)] if recipe.ema_decay else []
        spec = StepSpec((side, side, 3), recipe.weight_decay, recipe.label_smoothing)
        step = make_train_step(net, optimizer, spec, [Averaging(average) for average in averages])
        count, flags = tf.constant(examples), tf.zeros([0])

    def repeat(steps: int) -> None:
        for _ in range(steps):
            loss = step([batch], count, RATE, flags)[0]
        if not np.isfinite(loss.numpy()):  # waits for the device
            raise ValueError("the loss is not finite")

    return repeat


def batches(model: str, examples: int, device: str) -> Callable[[int], None]:
    """What takes batches of random images from the pipeline of `train`, without a step."""
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (IMAGES, 32, 32, 3), np.uint8), np.arange(IMAGES) % 10
    dataset = Dataset.from_arrays(images, labels, images[:10], labels[:10])
    augmented = transforms(nets.recipe_of(model).augmentation, dataset)
    sampler = Sampler(IMAGES, examples, 0, 0, 1)
    given = iter(training_batches(dataset.train, augmented, sampler, first_step=0, last_step=TOTAL, device=device))

    def repeat(steps: int) -> None:
        for _ in range(steps):
            batch = next(given)
        batch.label.numpy()  # waits for the device

    return repeat


def kernels(folder: Path, steps: int) -> list[tuple[str, float, float]]:
    """What ran in a profile of some steps, longest first: name, how often in a step, milliseconds of a step."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(next(folder.rglob("*.xplane.pb")).read_bytes())
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    often: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for plane in gpus or [plane for plane in space.planes if plane.name.startswith("/host:CPU")]:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):  # summaries of the same kernels
                continue
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                often[name] += 1
                taken[name] += event.duration_ps
    return [(name, often[name] / steps, time / steps * 1e-9) for name, time in taken.most_common()]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--model", required=True)
@click.option("--precision", required=True)
@click.option("--batch-size", required=True, type=int)
@click.option("--profile", default="", help="Write the kernels of one step to --output instead of serving.")
@click.option("--output", type=Path)
def main(model: str, precision: str, batch_size: int, profile: str, output: Path | None) -> None:
    """Serve, or profile."""
    world = start()
    is_on_gpu = "GPU" in world.device

    def make(name: str) -> Callable[[int], None]:
        if name == PIPELINE:
            return batches(model, batch_size, world.device if is_on_gpu else "")
        return steps_of(model, precision, batch_size, world.device)

    def reset() -> int:
        if is_on_gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")
        return peak()

    def peak() -> int:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) if is_on_gpu else 0

    if not profile or output is None:
        serve(make, reset, peak)
        return
    repeat, steps = make(profile), 8
    repeat(LEAD_IN)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        repeat(steps)
        tf.profiler.experimental.stop()
        rows = kernels(Path(folder), steps)
    head = f"{sum(count for _, count, _ in rows):.0f} kernels, {sum(ms for *_, ms in rows):.2f} ms a step"
    table = [f"| {name[:90]} | {count:.1f} | {ms:.3f} |" for name, count, ms in rows[:30]]
    lines = [f"{profile}, {model}, {precision}, {batch_size} images: {head}", "", "| kernel | a step | ms |"]
    replace_text(output, "\n".join([*lines, "|---|---|---|", *table]) + "\n")


if __name__ == "__main__":
    main()
