"""Where a step's time goes, operation by operation.

    python -m benchmarks.operations --data-dir D --model resnet20
    python -m benchmarks.operations --data-dir D --model fast --batch-size 256

One rank on one thread, fed from memory, under TensorFlow's profiler. A row is a kind of operation, summed over the net;
what XLA has compiled, such as GELU, is not among them.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks import setting
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.runtime.environment import prepare_tensorflow

prepare_tensorflow(os.environ)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# As the profiler names the run of an operation: its name in the graph, and its kind.
OPERATION = re.compile(r"[^:]+:([A-Za-z_]\w*)")


class Row(NamedTuple):
    """A kind of operation: milliseconds of a step, and how many there are in one."""

    kind: str
    milliseconds: float
    times: float


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True, help="Folder with binary CIFAR-10.")
@click.option("--model", default="resnet20")
@click.option("--precision", default="float32")
@click.option("--batch-size", type=click.IntRange(1), default=128)
@click.option("--steps", type=click.IntRange(1), default=5)
@click.option("--least", type=click.FloatRange(0), default=0.005, help="Least share of the step for a row of its own.")
@setting.one_line_for_users()
def main(data_dir: Path, model: str, precision: str, batch_size: int, steps: int, least: float) -> None:
    """Profile, then print a table in Markdown."""
    from hvd_cifar.tools.benchmark import job
    from hvd_cifar.tools.benchmark.step import make_bench

    given = {"model": model, "precision": precision, "batch_size": batch_size, "dataset": "cifar10"}
    settings = make(TrainSettings, {**given, "data_dir": str(setting.real_data(data_dir))})
    with job.start((1,), threads=1) as alone:
        bench = make_bench(alone, settings)
        step = bench.repeat(1, "step")
        step(3)  # traces, and fills caches
        began = time.perf_counter()
        step(steps)
        unwatched = (time.perf_counter() - began) / steps * 1000
        with tempfile.TemporaryDirectory() as folder:
            rows, whole = profile(step, steps, Path(folder))
    print(table(rows, whole, least))
    print(
        f"\n{model}, {precision}, {batch_size} images, {steps} steps; {unwatched:,.0f} ms a step without the profiler"
    )
    print(setting.about())


def profile(step: Any, steps: int, folder: Path) -> tuple[list[Row], float]:
    """Rows, the longest first, and the milliseconds of a step, of `step(steps)` under TensorFlow's profiler."""
    import tensorflow as tf

    with tf.profiler.experimental.Profile(str(folder)):
        began = time.perf_counter()
        step(steps)
        whole = (time.perf_counter() - began) / steps * 1000
    spent: dict[str, list[float]] = {}
    for kind, milliseconds in _operations(folder):
        spent.setdefault(kind, []).append(milliseconds)
    rows = [Row(kind, sum(each) / steps, len(each) / steps) for kind, each in spent.items()]
    return sorted(rows, key=lambda row: -row.milliseconds), whole


def _operations(folder: Path) -> Iterator[tuple[str, float]]:
    """Kind and milliseconds of every operation that a profile has on the processor.

    One that runs within another, on the same thread, is part of that one.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = folder.glob("**/*.xplane.pb")
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        names = {number: about.name for number, about in plane.event_metadata.items()}
        for line in plane.lines if "CPU" in plane.name else ():
            end = 0
            for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
                found = OPERATION.fullmatch(names[event.metadata_id].split("#")[0])
                if found and event.offset_ps >= end:
                    end = event.offset_ps + event.duration_ps
                    yield found[1], event.duration_ps / 1e9


def table(rows: list[Row], whole: float, least: float) -> str:
    """Markdown; kinds that take less than `least` of a step stand together in one row."""
    lines = ["| operation | ms a step | of it | in a step |", "|---|---|---|---|"]
    small = [row for row in rows if row.milliseconds < least * whole]
    shown = [row for row in rows if row not in small]
    shown.append(Row(f"{len(small)} other kinds", sum(r.milliseconds for r in small), sum(r.times for r in small)))
    for kind, milliseconds, times in shown:
        lines.append(f"| {kind} | {milliseconds:,.1f} | {milliseconds / whole:.1%} | {times:,.0f} |")
    rest = whole - sum(row.milliseconds for row in rows)
    lines.append(f"| between operations, in XLA, and Python | {rest:,.1f} | {rest / whole:.1%} | |")
    return "\n".join([*lines, f"| the step | {whole:,.1f} | 100.0% | |"])


if __name__ == "__main__":
    main()
