"""A net under Horovod's own elastic mode: the peer of `--elastic`.

    horovodrun --gloo --min-np 1 --max-np 2 --host-discovery-script FILE python -m benchmarks.peers.elastic_horovod ...

`python -m benchmarks.peers.elastic` starts it. Net, batches, augmentation and moving averages are this project's own;
the step and the state are as in Horovod's documentation, with three changes that Keras 3 and an exact epoch require.
`TensorFlowKerasState` gets TensorFlow's variables, since it cannot send Keras's. The update is written out. Global
batch and learning rate stay the same for any number of ranks, and the order of the data follows the step.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import horovod.tensorflow as hvd
import tensorflow as tf

from benchmarks import nets
from benchmarks.peers.stamps import Ledger, Stamps
from hvd_cifar.data.augment import transforms as transforms_named
from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.data.pipeline import training_batches
from hvd_cifar.data.sampler import Sampler, Sharding, examples_in_step
from hvd_cifar.fields import Precision
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.training.step import cross_entropy


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True)
@click.option("--model", default="tutorial")
@click.option("--global-batch-size", default=128)
@click.option("--precision", default="float32")
@click.option("--threads", default=1)
@click.option("--commit-every", default=10, help="Steps between commits.")
@click.option("--max-steps", type=int, required=True)
@click.option("--run-dir", type=Path, required=True)
def main(
    data_dir: Path,
    model: str,
    global_batch_size: int,
    precision: Precision,
    threads: int,
    commit_every: int,
    max_steps: int,
    run_dir: Path,
) -> None:
    """Train to the end."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads + 1)  # one waits for the collective
    hvd.init()
    folder = CIFAR10.locate(data_dir)
    if folder is None:
        raise click.UsageError(f"--data-dir {data_dir}: no CIFAR-10 in its binary layout is there")
    dataset = CIFAR10.read(folder)
    recipe = nets.recipe_of(model).for_batch(global_batch_size)
    transforms = transforms_named(recipe.augmentation, dataset)
    net = nets.build(model, transforms.shape[0], precision)
    variables = [v.value for v in net.model.trainable_variables]
    decayed = {id(v.value) for v in net.decayed}
    momentum = getattr(recipe.optimizer(recipe.learning_rate), "momentum", 0.0)
    slots = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables] if momentum else []
    averages = MovingAverage(net.model.trainable_variables, recipe.ema_decay) if recipe.ema_decay else None
    rate = recipe.learning_rate * recipe.batch.scale_of(global_batch_size)

    shape = [tf.TensorSpec([None, *transforms.shape]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([])]

    @tf.function(input_signature=shape)  # one graph, whose operations have the same names on all ranks
    def step(image: Any, label: Any, count: Any) -> Any:
        with tf.GradientTape() as tape:
            # Shards differ in size where the ranks do not divide the batch: their sum over its size is the mean.
            loss = tf.reduce_sum(cross_entropy(label, net.model(image, training=True))) / count
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        for i, (v, gradient) in enumerate(zip(variables, tape.gradient(loss, variables), strict=True)):
            if id(v) in decayed:
                gradient += recipe.weight_decay * v
            if slots:
                slots[i].assign(momentum * slots[i] + gradient)
                gradient = slots[i]
            v.assign_sub(rate * gradient)
        if averages:
            averages.update()
        return hvd.allreduce(loss, op=hvd.Sum)

    ledger = Ledger(run_dir / "ledger")

    @hvd.elastic.run
    def train(state: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        stamps = Stamps(run_dir if rank == 0 else None, goes_on=True)
        ledger.go_on_from(state.step)
        hvd.allreduce(tf.zeros([]))  # no rank uses an example before all have written this
        sampler = Sampler(len(dataset.train), global_batch_size, 0, Sharding(rank, size))
        batches = training_batches(dataset.train, transforms, sampler, first_step=state.step, last_step=max_steps)
        for image, label, _, example in batches:
            ledger.use(state.step + 1, example.numpy())
            loss = step(image, label, examples_in_step(len(dataset.train), global_batch_size, state.step))
            state.step += 1
            stamps.write(state.step, float(loss))
            if state.step % commit_every == 0:
                state.commit()

    state_of = SimpleNamespace(
        built=True, variables=[v.value for v in (*net.model.variables, *(averages.variables if averages else ()))]
    )
    train(hvd.elastic.TensorFlowKerasState(state_of, SimpleNamespace(variables=lambda: slots), step=0))
    if hvd.rank() == 0:
        digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables)).hexdigest()
        (run_dir / "summary.json").write_text(json.dumps({"weights_sha256": digest}) + "\n")


if __name__ == "__main__":
    main()
