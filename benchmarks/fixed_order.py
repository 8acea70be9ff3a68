"""What a fixed order of addition costs: a net's gradients over the ranks, by three ways, side by side.

    mpirun -np 2 --bind-to none python -m benchmarks.fixed_order --model tutorial

"all-reduce" is Horovod's, in the order that MPI chooses; the others are the two ways of
`distributed.fixed_order.all_reduce_in_tree`, which --deterministic and --virtual-shards use. The ways take turns within
each repeat, so that a machine that drifts favours none.
"""

from __future__ import annotations

import statistics
import time

import click
import horovod.tensorflow as hvd
import tensorflow as tf

from benchmarks import nets
from hvd_cifar.distributed.fixed_order import all_reduce_in_tree
from hvd_cifar.runtime.world import start


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--model", type=click.Choice(list(nets.MODELS)), default="tutorial", show_default=True)
@click.option("--repeats", type=click.IntRange(2), default=40, show_default=True)
def main(model: str, repeats: int) -> None:
    """Measure; rank 0 prints a table."""
    world = start()
    variables = nets.build(model, 24 if model == "tutorial" else 32).model.trainable_variables
    gradients = [tf.random.stateless_normal(v.shape, (world.rank, i)) for i, v in enumerate(variables)]
    ways = {
        "all-reduce": tf.function(lambda: hvd.grouped_allreduce([tf.identity(g) for g in gradients], op=hvd.Sum)),
        "tree, all-to-all": tf.function(lambda: all_reduce_in_tree(gradients, gather=False)),
        "tree, gather": tf.function(lambda: all_reduce_in_tree(gradients, gather=True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 3):
        for name, way in ways.items():
            hvd.allreduce(tf.zeros(1))  # all begin together
            began = time.perf_counter()
            way()[-1].numpy()
            if repeat >= 3:  # the first ones trace and warm up
                seconds[name].append(time.perf_counter() - began)
    if world.is_root:
        size = sum(g.shape.num_elements() for g in gradients) * 4 / 2**20
        print(f"| {model}, {size:.1f} MiB, {world.size} ranks, n = {repeats} | median, ms | quartiles, ms | ratio |")
        print("|---|---|---|---|")
        base = statistics.median(seconds["all-reduce"])
        for name, taken in seconds.items():
            low, middle, high = statistics.quantiles(taken, n=4)
            print(f"| {name} | {middle * 1e3:.2f} | {low * 1e3:.2f} to {high * 1e3:.2f} | {middle / base:.2f} |")
    hvd.allreduce(tf.zeros(1))


if __name__ == "__main__":
    main()
