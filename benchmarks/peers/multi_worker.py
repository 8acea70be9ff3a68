"""A net under tf.distribute.MultiWorkerMirroredStrategy: the peer that TensorFlow itself brings.

    TF_CONFIG=... python -m benchmarks.peers.multi_worker --data-dir D --run-dir R

`python -m benchmarks.peers` starts the workers. Net, batches, augmentation and moving averages are this project's own,
so the table shows only what the strategy costs. It gets its fastest form: plain variables with one fused update each,
which Keras 3's optimizers do not make under this strategy, and one ring all-reduce of all gradients.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from benchmarks import nets
from benchmarks.peers.stamps import Stamps
from hvd_cifar.data.augment import transforms as transforms_named
from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.data.pipeline import training_batches
from hvd_cifar.data.sampler import Sampler, Sharding
from hvd_cifar.fields import Precision
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.training.step import cross_entropy

STEPS = 10**6
PATIENCE_MILLISECONDS = 24 * 3600 * 1000  # workers are stopped while others are measured


def be_patient(workers: list[str]) -> None:
    """Have TensorFlow's coordination service treat a stopped worker as alive; the strategy has no option for this."""
    job = coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=len(workers))
    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=PATIENCE_MILLISECONDS,
        coordinated_jobs=[job],
    )


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True)
@click.option("--model", default="resnet20")
@click.option("--batch-size", default=128, help="Examples of a worker.")
@click.option("--precision", default="float32")
@click.option("--threads", default=1)
@click.option("--log-every", default=10)
@click.option("--run-dir", type=Path, required=True)
def main(
    data_dir: Path, model: str, batch_size: int, precision: Precision, threads: int, log_every: int, run_dir: Path
) -> None:
    """Train for ever."""
    cluster = json.loads(os.environ["TF_CONFIG"])
    rank, workers = cluster["task"]["index"], cluster["cluster"]["worker"]
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads + 1)  # one waits for the collective
    be_patient(workers)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    folder = CIFAR10.locate(data_dir)
    if folder is None:
        raise click.UsageError(f"--data-dir {data_dir}: no CIFAR-10 in its binary layout is there")
    dataset = CIFAR10.read(folder)
    batch = batch_size * len(workers)
    recipe = nets.recipe_of(model).for_batch(batch)
    transforms = transforms_named(recipe.augmentation, dataset)
    net = nets.build(model, transforms.shape[0], precision)
    variables = [v.value for v in net.model.trainable_variables]
    decayed = {id(v.value) for v in net.decayed}
    momentum = getattr(recipe.optimizer(recipe.learning_rate), "momentum", 0.0)
    slots = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables] if momentum else []
    averages = MovingAverage(net.model.trainable_variables, recipe.ema_decay) if recipe.ema_decay else None
    sizes = [v.shape.num_elements() for v in variables]
    rate = recipe.learning_rate * recipe.batch.scale_of(batch)

    def replica_step(image: Any, label: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(cross_entropy(label, net.model(image, training=True))) / batch
        own = tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(loss, variables)], 0)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own, options)
        for i, (v, part) in enumerate(zip(variables, tf.split(total, sizes), strict=True)):
            gradient = tf.reshape(part, v.shape)
            if id(v) in decayed:
                gradient += recipe.weight_decay * v
            if slots:
                tf.raw_ops.ResourceApplyMomentum(
                    var=v.handle, accum=slots[i].handle, lr=rate, grad=gradient, momentum=momentum
                )
            else:
                tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=rate, delta=gradient)
        if averages:
            averages.update()
        return loss

    @tf.function(reduce_retracing=True)
    def step(image: Any, label: Any) -> Any:
        return strategy.run(replica_step, (image, label))

    batches = training_batches(
        dataset.train,
        transforms,
        Sampler(len(dataset.train), batch, 0, Sharding(rank, len(workers))),
        first_step=0,
        last_step=STEPS,
    )
    stamps = Stamps(run_dir if rank == 0 else None)
    for done, (image, label, *_) in enumerate(batches, start=1):
        loss = step(image, label)
        if done % log_every == 0:
            stamps.write(done, float(loss) * len(workers))


if __name__ == "__main__":
    main()
