"""Scaling efficiency to expect on other numbers of ranks and other networks, and the error of each prediction.

    ./run.sh --hostfile H benchmark step --json step.json
    ./run.sh --hostfile H benchmark allreduce --json allreduce.json
    python -m benchmarks.predict --step step.json --allreduce allreduce.json --ranks 16,64,512

A step takes its slowest rank's computation and the part of the all-reduces that backward does not hide. An all-reduce
of S bytes over H hosts of L ranks is a ring between the hosts and one within each (docs/network.md):

    seconds = start + 2 (H - 1) alpha + 2 (H - 1) / H * S * beta + 2 (L - 1) alpha' + 2 (L - 1) / L * S * beta'

The five numbers are fitted to the measured all-reduces. The first rows are of ranks that were measured: they show what
the formula is worth. Ranks that share a core are not modelled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":  # before the import of TensorFlow, which computes nothing here: no notes of it
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
from benchmarks import setting
from hvd_cifar.distributed.overlap import Backward, Link, choose, seconds_with
from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.results import AllreduceResult, StepResult, WorldResult

# For shorter messages the all-reduce uses another algorithm than a ring, and a step sends none.
LEAST_BYTES = 2**14
NUMBERS = ("beta", "start", "alpha", "local_beta", "local_alpha")  # of two that cannot be told apart, the first is used

Floats = NDArray[np.float64]
Result = TypeVar("Result", StepResult, AllreduceResult)


class Layout(NamedTuple):
    """`local` ranks on each of `hosts`."""

    hosts: int
    local: int

    @classmethod
    def of(cls, local_ranks: Sequence[int]) -> Layout:
        """From each rank's local rank. Unevenly spread ranks form one ring, as if each had its own host."""
        hosts = local_ranks.count(0)
        even = all(local_ranks.count(i) == hosts for i in range(max(local_ranks) + 1))
        return cls(hosts, len(local_ranks) // hosts) if even else cls(len(local_ranks), 1)

    @classmethod
    def filled(cls, ranks: int, slots: int) -> Layout:
        """`ranks` on hosts that are filled in turn with up to `slots` each."""
        local = min(ranks, slots)
        return cls(ranks, 1) if ranks % local else cls(ranks // local, local)


class Point(NamedTuple):
    """An all-reduce that was measured."""

    layout: Layout
    bytes: int
    seconds: float


class Fit(NamedTuple):
    """The numbers of the formula, in the order of NUMBERS: seconds, and seconds a byte."""

    beta: float = 0.0
    start: float = 0.0
    alpha: float = 0.0
    local_beta: float = 0.0
    local_alpha: float = 0.0

    def seconds(self, layout: Layout, size: float) -> float:
        """The time of an all-reduce of `size` bytes; 0 for one rank."""
        return float(np.dot(self, _factors(layout, size))) if layout.hosts * layout.local > 1 else 0.0


def _factors(layout: Layout, size: float) -> list[float]:
    between, within = (2 * (n - 1) for n in layout)
    return [between / layout.hosts * size, 1.0, between, within / layout.local * size, within]


def fit(points: Sequence[Point]) -> tuple[Fit, tuple[str, ...]]:
    """The numbers, none below 0, and the names of those that the measurements do not determine, which are 0.

    Least squares of predicted / measured - 1, since times range from microseconds to seconds.

    Raises:
        UserError: where there are not two sizes.
    """
    points = [p for p in points if p.bytes >= LEAST_BYTES]
    if len({p.bytes for p in points}) < 2:
        raise UserError(f"--allreduce: it has fewer than two sizes of {LEAST_BYTES} bytes or more; measure more sizes")
    rows = np.array([_factors(p.layout, p.bytes) for p in points]) / np.array([[p.seconds] for p in points])
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    known: list[int] = []
    for i in range(len(NUMBERS)):
        if np.linalg.matrix_rank((rows / scale)[:, [*known, i]], tol=1e-6) > len(known):
            known.append(i)
    values = np.zeros(len(NUMBERS))
    values[known] = _not_negative((rows / scale)[:, known], np.ones(len(rows))) / scale[known]
    return Fit(*values.tolist()), tuple(name for i, name in enumerate(NUMBERS) if i not in known)


def _not_negative(rows: Floats, wanted: Floats) -> Floats:
    """The least squares of rows @ x - wanted with no number below 0: the best of all sets of at most five columns."""
    best, least = np.zeros(rows.shape[1]), float(wanted @ wanted)
    for count in range(1, rows.shape[1] + 1):
        for columns in combinations(range(rows.shape[1]), count):
            x, *_ = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)
            error = float(((rows[:, columns] @ x - wanted) ** 2).sum())
            if (x >= 0).all() and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[list(columns)] = x
    return best


class Network(NamedTuple):
    """All-reduces: the fit of their time, and of the processor time that they take from backward."""

    wall: Fit
    processor: Fit

    def link(self, layout: Layout) -> Link:
        """The all-reduce over the ranks of a layout."""
        overheads = [each.seconds(layout, 0) for each in self]
        per_byte = [each.seconds(layout, 1) - overhead for each, overhead in zip(self, overheads, strict=True)]
        return Link(overheads[0], per_byte[0], min(overheads), per_byte[1])


class Row(NamedTuple):
    """A prediction: seconds of a step, bytes of its buckets (None: one message), efficiency."""

    layout: Layout
    seconds: float
    bucket_bytes: int | None
    efficiency: float


def predict(step: StepResult, network: Network, layout: Layout, like: WorldResult, measured: bool = False) -> Row:
    """A step on ranks of `layout`, whose computation is that of `like`. `measured`: with the buckets of `step`."""
    phases, mean = step.phases, like.compute_seconds.mean
    if layout.hosts * layout.local == 1:
        return Row(layout, mean, None, 1.0)
    # The phases are measured apart from a step, so that their sum differs from its time: they are scaled to it.
    slowest = like.lockstep_seconds.mean if like.ranks > 1 else mean
    scale = slowest / (phases.forward_seconds + phases.backward_seconds + phases.update_seconds)
    ready = tuple(gradient.ready_seconds * scale for gradient in phases.gradients)
    backward = Backward(phases.forward_seconds * scale, ready, tuple(gradient.bytes for gradient in phases.gradients))
    link, buckets = network.link(layout), step.bucket_bytes if measured else None
    # Ranks choose buckets over a network and on GPUs. The loss scale of float16 looks at all gradients.
    if not measured and (layout.hosts > 1 or "GPU" in step.facts.device) and step.precision != "mixed_float16":
        buckets = choose(backward, link).bucket_bytes
    seconds = seconds_with(backward, link, buckets) + phases.update_seconds * scale
    return Row(layout, seconds, buckets, mean / seconds)


def network_of(step: StepResult, allreduce: AllreduceResult) -> tuple[Network, tuple[str, ...]]:
    """The fits of Horovod's all-reduces, and the numbers that they do not determine."""
    measured = allreduce.points
    layouts = [Layout.of(allreduce.facts.local_ranks[: p.ranks]) for p in measured]
    wall, unknown = fit([Point(at, p.bytes, p.seconds.mean) for at, p in zip(layouts, measured, strict=True)])
    if "GPU" in step.facts.device:  # which goes on while the processor works for the all-reduce
        return Network(wall, Fit()), unknown
    used = [Point(at, p.bytes, max(p.processor_seconds, 1e-9)) for at, p in zip(layouts, measured, strict=True)]
    return Network(wall, fit(used)[0]), unknown


def read(kind: type[Result], path: Path, option: str) -> Result:
    """A result of a benchmark. Raises UserError where the file, which `option` names, holds none."""
    name = kind.model_fields["benchmark"].default
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise UserError(f"{option} {path}: {failure.strerror}; give the --json file of `benchmark {name}`") from None
    except ValueError:
        raise UserError(f"{option} {path}: is no result of `benchmark {name}`; give its --json file") from None


def _numbers(context: Any, parameter: Any, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter("write numbers of ranks with commas between them, such as 16,64")
    return [int(word) for word in words]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--step", "step_file", type=Path, required=True, help="JSON file of `benchmark step`.")
@click.option("--allreduce", "allreduce_file", type=Path, required=True, help="JSON file of `benchmark allreduce`.")
@click.option("--ranks", default="2,4,8,16,64,512", callback=_numbers, show_default=True)
@click.option("--ranks-per-host", type=click.IntRange(1), help="[default: as measured]")
@click.option("--gbit", type=click.FloatRange(0, min_open=True), help="Each host's link, Gbit/s. [default: measured]")
@click.option("--latency-us", type=click.FloatRange(0), help="Of a message over the link. [default: measured]")
@setting.one_line_for_users()
def main(
    step_file: Path,
    allreduce_file: Path,
    ranks: list[int],
    ranks_per_host: int | None,
    gbit: float | None,
    latency_us: float | None,
) -> None:
    """Print the checks and the predictions, in Markdown."""
    step, allreduce = read(StepResult, step_file, "--step"), read(AllreduceResult, allreduce_file, "--allreduce")
    network, unknown = network_of(step, allreduce)
    given = {"beta": 8e-9 / gbit} if gbit else {}
    given |= {} if latency_us is None else {"alpha": latency_us * 1e-6}
    other = network._replace(wall=network.wall._replace(**given))
    local = step.facts.local_ranks
    print("| ranks | a step, ms | gradients leave | efficiency | measured | error |\n" + "|---" * 6 + "|")
    for world in (world for world in step.worlds if world.ranks > 1):
        row = predict(step, network, Layout.of(local[: world.ranks]), world, measured=True)
        error = f"{row.efficiency / world.efficiency.mean - 1:+.1%}"
        print(_line(row, f"{world.efficiency.mean:.3f}", error))
    for count in ranks:
        layout = Layout.filled(count, ranks_per_host or Layout.of(local).local)
        print(_line(predict(step, other, layout, step.worlds[-1])))
    print("\nfitted: " + ", ".join(f"{name} {value:.3g} s" for name, value in zip(NUMBERS, network.wall, strict=True)))
    if missing := [name for name in unknown if name not in given]:
        print(f"NOT DETERMINED by these all-reduces, and taken as 0: {', '.join(missing)}; measure on more layouts")
    if step.facts.hosts != allreduce.facts.hosts:
        print("THE TWO MEASUREMENTS ARE OF DIFFERENT HOSTS: the checks say little")


def _line(row: Row, *checked: str) -> str:
    way = "in one message" if row.bucket_bytes is None else f"in buckets of {row.bucket_bytes // 2**10} KiB"
    cells = [f"{row.layout.hosts * row.layout.local}", f"{row.seconds * 1e3:.2f}", way]
    cells += [f"{row.efficiency:.3f}", *(checked or ("", ""))]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
