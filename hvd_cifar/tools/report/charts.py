"""Charts as SVG within a page. Matplotlib draws them; the page's style sheet colours them, in light and dark mode."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from markupsafe import Markup
from matplotlib import pyplot

from hvd_cifar.reporting import goodput
from hvd_cifar.reporting.run_files import Evaluated, RunFiles, Train, Validated
from hvd_cifar.reporting.story import Happening
from hvd_cifar.tools.benchmark import plots
from hvd_cifar.tools.benchmark.results import AllreduceResult, StepResult

Benchmark = StepResult | AllreduceResult
Draw = Callable[[Any], None]

SIZE = (5.2, 2.9)  # inches of 72 px: about a phone's width, at which text appears in its nominal size
SERIES = 8  # colours
MOST_NUMBERS = 12  # of happenings above a chart: more would overlap
SMOOTHED = 50  # points of a line of means, about
# Placeholders: `_for_page` replaces each colour by a variable of the style sheet.
_COLOURS = {"#010101": "--muted", "#020202": "--line", "#000000": "--text", "#030303": "--bad", "#040404": "--accent"}
_COLOURS |= {f"#0500{i:02x}": f"--s{i}" for i in range(SERIES)}
TEXT, LINE, _, BAD, ACCENT, *CYCLE = _COLOURS
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.size": 10.5,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "axes.edgecolor": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "axes.prop_cycle": cycler(color=CYCLE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


def svg(draw: Draw, name: str, **subplots: Any) -> Markup:
    """A chart that `draw` fills, for a page.

    Args:
        draw: is given the axes, as `pyplot.subplots` makes them.
        name: what the chart shows, for screen readers; unique in the page.
        subplots: arguments of `pyplot.subplots`.
    """
    text = io.StringIO()
    # With a salt, ids within the SVG are the same for the same run, and differ between charts of a page.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained", **subplots)
        draw(axes)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
        pyplot.close(figure)
    return Markup(_for_page(text.getvalue(), name))


def _for_page(text: str, name: str) -> str:
    """An SVG file as an element of a page: its size, fonts and colours are the style sheet's."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would apply to the whole page
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # an id must be unique in a page, and charts have the same ones
    text = re.sub(r"font-family: [^;\"]*(; )?", "", text)
    text = re.sub("|".join(_COLOURS), lambda found: f"var({_COLOURS[found[0]]})", text)
    label = Markup.escape(name)
    opening = f'<svg class="chart" role="img" aria-label="{label}" '
    return re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', lambda found: f"{opening}{found[1]}>", text, count=1)


def curves(runs: Sequence[RunFiles]) -> dict[str, Markup]:
    """Loss, accuracy, learning rate and speed over epochs."""
    train = [run.of_kind(Train) for run in runs]
    tests = [run.of_kind(Evaluated) for run in runs]
    validations = [run.of_kind(Validated) for run in runs]

    def over_epochs(name: str) -> Draw:
        def draw(axes: Any) -> None:
            for number, events in enumerate(train):
                x, y = [e.epoch for e in events], [getattr(e, name) for e in events]
                _curve(axes, x, y, CYCLE[number % SERIES], smooth=name != "learning_rate")
            axes.set(xlabel="epoch")
            if name == "images_per_second":
                axes.set_ylim(0)

        return draw

    def accuracy(of_runs: Sequence[Sequence[Any]], name: str) -> Draw:
        def draw(axes: Any) -> None:
            for number, events in enumerate(of_runs):
                percent = [100 * getattr(e, name) for e in events]
                _points(axes, [e.epoch for e in events], percent, CYCLE[number % SERIES])
            axes.set(xlabel="epoch")

        return draw

    drawn = {"Training loss": over_epochs("loss")}
    drawn |= {"Validation accuracy, %": accuracy(validations, "validation_accuracy")} if any(validations) else {}
    drawn |= {"Test accuracy, %": accuracy(tests, "test_accuracy")} if any(tests) else {}
    drawn |= {"Learning rate": over_epochs("learning_rate"), "Speed, images/s": over_epochs("images_per_second")}
    return {name: svg(draw, name) for name, draw in drawn.items()}


def _curve(axes: Any, x: Sequence[float], y: Sequence[float], colour: str, smooth: bool) -> None:
    """A curve; one of very many points is drawn faintly, below a line of its means."""
    size = len(x) // SMOOTHED if smooth else 0
    if size < 2:
        axes.plot(x, y, color=colour)
        return
    axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.8)
    whole = len(x) // size * size
    means = (np.reshape(np.array(values[:whole]), (-1, size)).mean(axis=1) for values in (x, y))
    axes.plot(*means, color=colour)


def _points(axes: Any, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    axes.plot(x, y, color=colour, marker="o", markersize=3.5)


def _unit(seconds: float) -> tuple[str, int]:
    """The unit that suits a time, and that unit in seconds."""
    return ("hours", 3600) if seconds > 2 * 3600 else ("minutes", 60) if seconds > 120 else ("seconds", 1)


class JobTime:
    """Seconds that a run took up to a Unix time, without those between two launchers."""

    def __init__(self, marks: Sequence[goodput.Mark]) -> None:
        self._intervals = goodput.intervals(marks)
        self.total = self(math.inf)

    def __call__(self, time: float) -> float:
        """Up to a Unix time."""
        return sum(max(0.0, min(time, end) - begin) for _, begin, end in self._intervals)

    def by_kind(self, kind: str) -> list[tuple[float, float]]:
        """The intervals of a kind of `goodput.KINDS`: begins and lengths."""
        return [(self(begin), end - begin) for found, begin, end in self._intervals if found == kind]


def time_axis(run: RunFiles, happened: Sequence[Happening], name: str) -> Markup:
    """Steps over the run's time, with a number for each happening; below, a strip of the kinds of time."""
    now = JobTime(run.marks)
    unit, seconds = _unit(now.total)

    def draw(both: Any) -> None:
        axes, strip = both
        for times, steps in _sessions(run.marks, now):
            axes.plot(np.array(times) / seconds, steps, color=CYCLE[0])
        places = [now(one.time) / seconds for one in happened]
        axes.set(xlim=(0, now.total / seconds or 1), ylim=(0, None))
        axes.set_ylabel("step")
        bad = [one.kind == "failure" for one in happened]
        for x, is_bad in zip(places, bad, strict=True):
            axes.axvline(x, color=BAD if is_bad else LINE, linewidth=1, linestyle="-" if is_bad else ":")
        if len(places) <= MOST_NUMBERS:
            _number(axes, places, [BAD if is_bad else TEXT for is_bad in bad])
        for number, kind in enumerate(goodput.KINDS):
            parts = [(begin / seconds, length / seconds) for begin, length in now.by_kind(kind)]
            strip.broken_barh(parts, (0, 1), facecolors=CYCLE[number])
        strip.set(xlabel=unit, yticks=[], ylim=(0, 1))
        strip.grid(visible=False)
        strip.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", length=0)

    return svg(draw, name, nrows=2, height_ratios=[9, 1], sharex=True)


def _sessions(marks: Sequence[goodput.Mark], now: JobTime) -> list[tuple[list[float], list[int]]]:
    """Times and steps, as a curve for each session; a rollback begins a new one."""
    found: list[tuple[list[float], list[int]]] = []
    for mark in marks:
        if mark["mark"] in ("start", "rollback"):
            found.append(([], []))
        if found and isinstance(step := mark.get("step"), int) and mark["mark"] != "warning":
            found[-1][0].append(now(mark["time"]))
            found[-1][1].append(step)
    return found


def _number(axes: Any, places: Sequence[float], colours: Sequence[str]) -> None:
    """1, 2, ... above the axes, each with a line to its place; neighbours are moved apart."""
    low, high = axes.get_xlim()
    gap = (high - low) / MOST_NUMBERS
    shown: list[float] = []
    for place in places:
        shown.append(max(place, shown[-1] + gap if shown else low))
    for i in reversed(range(len(shown))):
        shown[i] = min(shown[i], high - gap * (len(shown) - 1 - i))
    for number, (place, x, colour) in enumerate(zip(places, shown, colours, strict=True), start=1):
        axes.annotate(
            str(number), (place, 1), (x, 1.1), xycoords=axes.get_xaxis_transform(), ha="center", va="bottom",
            color=colour, fontweight="bold", arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8},
        )  # fmt: skip


def of_benchmark(found: Benchmark, name: str) -> dict[str, Markup]:
    """The plots of `benchmark`, by what they show. `name` is unique among the results of the page."""
    match found:
        case StepResult():
            drawn: Mapping[str, Callable[[Any, Any], None]] = {
                "Speed and scaling efficiency": plots.speed,
                "Parts of a step": plots.parts,
            }
        case AllreduceResult():
            drawn = {"All-reduce: time": plots.times, "All-reduce: bus bandwidth": plots.bandwidths}

    def with_legend(draw: Callable[[Any, Any], None]) -> Draw:
        def both(axes: Any) -> None:
            draw(axes, found)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

        return both

    return {title: svg(with_legend(draw), f"{title}: {name}") for title, draw in drawn.items()}
