"""Results as pictures (PNG)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.fits import Layout
from hvd_cifar.tools.benchmark.results import (
    AllreducePoint,
    AllreduceResult,
    Estimate,
    FeedResult,
    InputResult,
    PredictResult,
    StepResult,
)

matplotlib.use("agg")  # before the import of pyplot, which otherwise looks for a display
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

COLUMNS = 20  # of the grids of examples
MOST_NAMED = 8  # ranks in a legend


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
        _with_errors(axes, ranks, estimates, label)
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
    """Time and bus bandwidth over sizes, for each way and number of ranks, with the fitted formula."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    times(left, found)
    left.set_title("time (dotted: fitted)")
    left.legend(fontsize="small")
    bandwidths(right, found)
    right.set_title("bus bandwidth")
    _save(figure, path)


def times(axes: Any, found: AllreduceResult) -> None:
    """Time over sizes, for each way and number of ranks; dotted: the fitted formula."""
    for way, ranks, points in _groups(found):
        size = [p.bytes for p in points]
        (line,) = axes.plot(size, [p.seconds.mean * 1e6 for p in points], marker=".", label=f"{way}, {ranks} ranks")
        fit = found.fits.get(way)
        if fit:
            layout = Layout.of(found.facts.local_ranks[:ranks])
            fitted = [fit.seconds(layout, s) * 1e6 for s in size]
            axes.plot(size, fitted, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us")


def bandwidths(axes: Any, found: AllreduceResult) -> None:
    """Bus bandwidth over sizes, for each way and number of ranks."""
    for way, ranks, points in _groups(found):
        values = [p.bus_bandwidth / 1e9 for p in points]
        axes.plot([p.bytes for p in points], values, marker=".", label=f"{way}, {ranks} ranks")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s")


def _groups(found: AllreduceResult) -> list[tuple[str, int, list[AllreducePoint]]]:
    """The measurements by way and number of ranks; the copies in memory only on the most ranks."""
    groups = sorted({(p.way, p.ranks) for p in found.points if p.way != "copy" or p.ranks == found.points[-1].ranks})
    return [(way, ranks, [p for p in found.points if (p.way, p.ranks) == (way, ranks)]) for way, ranks in groups]


def of_input(found: InputResult, path: Path) -> None:
    """The ranks that used the first examples of the set in each way, and images/s."""
    ranks = len(found.facts.hosts)
    colours = pyplot.get_cmap("viridis")(np.linspace(0.1, 0.9, ranks))[:, :3]
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 2.7), layout="constrained")
    for grid, way in zip(axes, found.ways, strict=False):
        _uses(grid, way, found.examples, colours)
    speeds = [way.images_per_second for way in found.ways]
    errors = [speed.standard_error or 0.0 for speed in speeds]
    axes[3].barh([way.way for way in found.ways], [s.mean for s in speeds], xerr=errors, color="0.6", capsize=3)
    axes[3].set(title="images/s, over all ranks")
    axes[3].invert_yaxis()
    axes[3].set_box_aspect(0.5)
    axes[3].xaxis.set_major_locator(MaxNLocator(4))
    named = range(ranks) if ranks <= MOST_NAMED else (0, ranks - 1)
    patches = [Patch(color=colours[rank], label=f"rank {rank}") for rank in named]
    patches += [Patch(color="tab:red", label="twice or more"), Patch(facecolor="white", edgecolor="0.5", label="never")]
    figure.suptitle(f"The first examples of {found.dataset}, and the ranks that saw them in one epoch")
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize="small")
    _save(figure, path)


def _uses(axes: Any, way: FeedResult, examples: int, colours: Any) -> None:
    """A square for each of the first examples, in the colour of the rank that used it."""
    squares = np.ones((-(-len(way.ranks_of_first) // COLUMNS), COLUMNS, 3))
    for place, ranks in enumerate(way.ranks_of_first):
        if ranks:
            squares[divmod(place, COLUMNS)] = colours[ranks[0]] if len(ranks) == 1 else to_rgb("tab:red")
    rows = len(squares)
    axes.pcolormesh(squares, edgecolors="0.8", linewidth=0.3)
    last = way.epochs[-1]
    shares = f"never {last.never / examples:.0%}, once {last.once / examples:.0%}, more {last.more / examples:.0%}"
    axes.set(title=way.way, xlabel=shares, xticks=[], yticks=[], aspect="equal", ylim=(rows, 0))


def of_predict(found: PredictResult, path: Path) -> None:
    """Efficiency over ranks, predicted and measured."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    efficiency(axes, found)
    axes.set_title(found.step.model)
    axes.legend()
    _save(figure, path)


def efficiency(axes: Any, found: PredictResult) -> None:
    """Efficiency over ranks, predicted and measured."""
    ranks = [p.ranks for p in found.predictions]
    in_one = [p.efficiency_in_one_message for p in found.predictions]
    axes.plot(ranks, in_one, marker=".", label="in one message, after backward")
    axes.plot(ranks, [p.efficiency for p in found.predictions], marker=".", label="as a run chooses")
    own = [p for p in found.checks if p.measured_on == p.ranks]
    measured = [
        Estimate(mean=p.measured, standard_error=p.measured_standard_error, n=0) for p in own if p.measured is not None
    ]
    if measured:
        label = "measured" if found.link_fit == found.allreduce.fits["horovod"] else "measured, without that link"
        _with_errors(axes, [p.ranks for p in own], measured, label, linestyle="", color="black")
    ticks = sorted({*ranks, *(p.ranks for p in own)})
    axes.set(xscale="log", xlabel="ranks", ylabel="scaling efficiency", ylim=(0, 1.05), xticks=ticks, xticklabels=ticks)
    axes.minorticks_off()


def _with_errors(axes: Any, x: list[int], estimates: list[Estimate], label: str, **style: Any) -> None:
    errors = [e.standard_error or 0.0 for e in estimates]
    axes.errorbar(x, [e.mean for e in estimates], yerr=errors, marker=".", capsize=3, label=label, **style)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give a file that can be written") from None
    finally:
        pyplot.close(figure)
