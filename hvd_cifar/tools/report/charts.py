"""Charts as SVG within a page. Matplotlib draws them; the page's style sheet colours them, in light and dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from markupsafe import Markup
from matplotlib import pyplot

from hvd_cifar.reporting import sessions
from hvd_cifar.reporting.run_files import Evaluated, RunFiles, Train
from hvd_cifar.reporting.sessions import Happening

matplotlib.use("agg")

SIZE = (5.2, 2.9)  # inches of 72 px: about a phone's width, at which text appears in its nominal size
SERIES = 8  # colours
MOST_POINTS = 100  # of a curve, about
# Placeholders: `_for_page` replaces each colour by a variable of the style sheet.
_COLOURS = {"#010101": "--muted", "#020202": "--line", "#000000": "--text", "#030303": "--bad"}
_COLOURS |= {f"#0500{i:02x}": f"--s{i}" for i in range(SERIES)}
TEXT, LINE, _, BAD, *CYCLE = _COLOURS
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.size": 10.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), LINE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    "axes.prop_cycle": cycler(color=CYCLE),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.linewidth": 0.6,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def svg(draw: Callable[[Any], None], name: str, **subplots: Any) -> Markup:
    """A chart for a page. `draw` is given the axes, as `pyplot.subplots` makes them with `subplots`.

    `name`: what the chart shows, for screen readers; unique in the page.
    """
    file = io.StringIO()
    # With a salt, ids within the SVG are the same for the same run, and differ between charts of a page.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained", **subplots)
        draw(axes)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
        pyplot.close(figure)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would apply to the whole page
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # an id must be unique in a page, and charts have the same ones
    text = re.sub(r"font-family: [^;\"]*(; )?", "", text)
    text = re.sub("|".join(_COLOURS), lambda found: f"var({_COLOURS[found[0]]})", text)
    opening = f'<svg class="chart" role="img" aria-label="{Markup.escape(name)}" '
    return Markup(re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', lambda found: f"{opening}{found[1]}>", text, count=1))


def curves(runs: Sequence[RunFiles]) -> dict[str, Markup]:
    """Loss, accuracy, learning rate and speed over epochs, by what they show."""
    shown = {"Training loss": "loss", "Validation accuracy, %": "validation", "Test accuracy, %": "test"}
    shown |= {"Learning rate": "learning_rate", "Speed, images/s": "images_per_second"}
    found = {}
    for title, name in shown.items():
        series = [_points(run, name) for run in runs]
        if any(series):
            found[title] = svg(partial(_over_epochs, series, title), title)
    return found


def _points(run: RunFiles, name: str) -> list[tuple[float, float]]:
    """Epochs and values: percent correct on a part of the data set, or a field of the log lines."""
    if name in ("test", "validation"):
        return [(e.epoch, 100 * e.accuracy) for e in run.of_kind(Evaluated) if e.part == name]
    return [(e.epoch, getattr(e, name)) for e in run.of_kind(Train)]


def _over_epochs(series: Sequence[Sequence[tuple[float, float]]], title: str, axes: Any) -> None:
    """A curve for each run; one of very many points is a line of its means."""
    for number, points in enumerate(series):
        values = np.array(points or np.empty((0, 2)))
        size = max(1, len(values) // MOST_POINTS)
        values = values[: len(values) // size * size].reshape(-1, size, 2).mean(axis=1)
        marker = "o" if "%" in title else ""
        axes.plot(*values.T, color=CYCLE[number % SERIES], marker=marker, markersize=3.5)
    axes.set(xlabel="epoch")
    if "images/s" in title:
        axes.set_ylim(0)


def time_axis(run: RunFiles, happened: Sequence[Happening], name: str) -> Markup:
    """Steps over the run's time, with a line for each happening; below, a strip of the kinds of time.

    The time between two launchers is left out.
    """
    intervals = sessions.intervals(run.marks)

    def job_time(time: float) -> float:
        """Seconds that the run took up to a Unix time."""
        return sum(max(0.0, min(time, end) - begin) for _, begin, end in intervals)

    total = job_time(float("inf"))
    unit, seconds = ("hours", 3600) if total > 2 * 3600 else ("minutes", 60) if total > 120 else ("seconds", 1)

    def draw(both: Any) -> None:
        axes, strip = both
        for session in _sessions(run.marks):
            axes.plot(*zip(*((job_time(time) / seconds, step) for time, step in session), strict=True), color=CYCLE[0])
        for one in happened:
            bad = one.kind == "failure"
            at = job_time(one.time) / seconds
            axes.axvline(at, color=BAD if bad else LINE, linewidth=1, linestyle="-" if bad else ":")
        axes.set(xlim=(0, total / seconds or 1), ylim=(0, None), ylabel="step")
        axes.tick_params(axis="x", length=0)
        for number, kind in enumerate(sessions.KINDS):
            parts = [(job_time(b) / seconds, (e - b) / seconds) for found, b, e in intervals if found == kind]
            strip.broken_barh(parts, (0, 1), facecolors=CYCLE[number])
        strip.set(xlabel=unit, yticks=[], ylim=(0, 1))
        strip.grid(visible=False)
        strip.spines["bottom"].set_visible(False)

    return svg(draw, name, nrows=2, height_ratios=[9, 1], sharex=True)


def _sessions(marks: Sequence[sessions.Mark]) -> list[list[tuple[float, int]]]:
    """Times and steps, as a curve for each session."""
    found: list[list[tuple[float, int]]] = []
    for mark in marks:
        if mark["mark"] == "start":
            found.append([])
        if found and isinstance(step := mark.get("step"), int) and mark["mark"] != "warning":
            found[-1].append((mark["time"], step))
    return [session for session in found if session]
