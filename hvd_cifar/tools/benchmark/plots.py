"""Results as pictures (PNG)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.results import AllreducePoint, AllreduceResult, StepResult

matplotlib.use("agg")  # before the import of pyplot, which otherwise looks for a display
from matplotlib import pyplot


def of_step(found: StepResult, path: Path) -> None:
    """Images/s over ranks, with and without communication; and the parts of a step's time."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    speed(left, found)
    left.legend()
    parts(right, found)
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.suptitle(f"{found.model}, {found.precision}, {found.per_rank_batch_size} images a rank")
    _save(figure, path)


def speed(axes: Any, found: StepResult) -> None:
    """Images/s over ranks, with and without communication."""
    ranks = [w.ranks for w in found.worlds]
    for label, estimates in (
        ("without communication", [w.images_per_second_alone for w in found.worlds]),
        ("training", [w.images_per_second for w in found.worlds]),
    ):
        errors = [e.standard_error or 0.0 for e in estimates]
        axes.errorbar(ranks, [e.mean for e in estimates], yerr=errors, marker=".", capsize=3, label=label)
    axes.set(xlabel="ranks", ylabel="images/s", xticks=ranks, ylim=(0, None))
    for w in found.worlds:
        place = (w.ranks, w.images_per_second.mean)
        axes.annotate(f"{w.efficiency.mean:.0%}", place, (0, -14), textcoords="offset points")


def parts(axes: Any, found: StepResult) -> None:
    """The parts of a step's time over ranks, as bars."""
    ranks = [w.ranks for w in found.worlds]
    places = np.arange(len(ranks))
    bars = {
        "computation": [w.compute_seconds.mean for w in found.worlds],
        "waiting for the slowest": [w.lockstep_seconds.mean - w.compute_seconds.mean for w in found.worlds],
        "exposed all-reduce": [  # one rank has none
            max(0.0, w.step_seconds.mean - w.lockstep_seconds.mean) if w.ranks > 1 else 0.0 for w in found.worlds
        ],
        "exposed input": [max(0.0, w.fed_seconds.mean - w.step_seconds.mean) for w in found.worlds],
    }
    bottom = np.zeros(len(ranks))
    for label, seconds in bars.items():
        axes.bar(places, np.array(seconds) * 1e3, bottom=bottom, label=label, width=0.6)
        bottom += np.array(seconds) * 1e3
    axes.set(xlabel="ranks", ylabel="ms a step", xticks=places, xticklabels=ranks)


def of_allreduce(found: AllreduceResult, path: Path) -> None:
    """Time and bus bandwidth over sizes, for each way and number of ranks."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    times(left, found)
    left.set_title("time")
    left.legend(fontsize="small")
    bandwidths(right, found)
    right.set_title("bus bandwidth")
    _save(figure, path)


def times(axes: Any, found: AllreduceResult) -> None:
    """Time over sizes, for each way and number of ranks."""
    for way, ranks, points in _groups(found):
        size = [p.bytes for p in points]
        axes.plot(size, [p.seconds.mean * 1e6 for p in points], marker=".", label=f"{way}, {ranks} ranks")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us")


def bandwidths(axes: Any, found: AllreduceResult) -> None:
    """Bus bandwidth over sizes, for each way and number of ranks."""
    for way, ranks, points in _groups(found):
        values = [p.bus_bandwidth / 1e9 for p in points]
        axes.plot([p.bytes for p in points], values, marker=".", label=f"{way}, {ranks} ranks")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s")


def _groups(found: AllreduceResult) -> list[tuple[str, int, list[AllreducePoint]]]:
    """The measurements by way and number of ranks."""
    groups = sorted({(p.way, p.ranks) for p in found.points})
    return [(way, ranks, [p for p in found.points if (p.way, p.ranks) == (way, ranks)]) for way, ranks in groups]


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give a file that can be written") from None
    finally:
        pyplot.close(figure)
