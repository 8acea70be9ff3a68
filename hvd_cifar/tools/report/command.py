"""`report`: one self-contained HTML page about one run or several."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import jinja2
import numpy as np

from hvd_cifar import __version__
from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_bytes
from hvd_cifar.reporting import sessions, terminal
from hvd_cifar.reporting.run_files import Confusion, Evaluated, Mistake, Ranks, RunFiles, Train, read_run
from hvd_cifar.tools.report import charts
from hvd_cifar.tools.settings import ReportSettings

MOST_HOSTS = 8  # by name
MOST_RANKS = 16  # in the table of ranks: the slowest
MOST_CLASSES = 20  # of a confusion matrix that fits a page
MOST_PAIRS = 10  # of a true and a predicted class that are confused
MOST_MISTAKES = 20
TOP = 3  # classes of a mistake
MOST_HAPPENINGS = 100


def report(settings: ReportSettings) -> None:
    """Write the page. UserError where there is no run, a file is damaged, or the page cannot be written."""
    output = settings.output or settings.run_dirs[0] / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):  # such as a run's config.json, which it would overwrite
        raise UserError(f"--output {output}: is no name of a page; give a file that ends in .html")
    runs = [read_run(run_dir) for run_dir in dict.fromkeys(settings.run_dirs)]
    for run in runs:
        if not run.of_kind(Train):
            raise UserError(f"{run.run_dir}: no log line is on record yet; wait for the first one (--log-every)")
    text = page(runs)
    try:
        replace_bytes(output, text.encode(errors="replace"))  # a folder's name need not be valid UTF-8
    except OSError as failure:
        raise UserError(f"cannot write {output}: {failure.strerror}; give another --output") from None
    terminal.say(f"{output}")


def page(runs: Sequence[RunFiles]) -> str:
    """The page as HTML. Autoescape escapes what comes from files; only `charts.svg` makes markup."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvd_cifar.tools.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"duration": duration, "clock": sessions.clock, "most_ranks": MOST_RANKS}
    names = [run.run_dir.name for run in runs]
    named = names if len(set(names)) == len(names) else [str(run.run_dir) for run in runs]
    return environment.get_template("page.html").render(
        runs=[_of_run(*one, number) for number, one in enumerate(zip(runs, named, strict=True), start=1)],
        curves=charts.curves(runs),
        differing=differing(runs),
        version=__version__,
    )


def _of_run(run: RunFiles, name: str, number: int) -> dict[str, Any]:
    happened = sessions.happenings(run.marks)
    if len(happened) > MOST_HAPPENINGS:  # the first and the newest
        happened = [happened[0], *happened[1 - MOST_HAPPENINGS :]]
    by_rank, slowest = times_of_ranks(run)
    shares = sessions.shares(run.marks)
    return {
        "name": name,
        "files": run,
        "results": results(run),
        "hosts": hosts_of(run),
        "settings": settings_of(run),
        "shares": [(i, kind.replace("_", " "), shares[kind]) for i, kind in enumerate(sessions.KINDS)],
        "by_rank": by_rank,
        "slowest": slowest,
        "time_axis": charts.time_axis(run, happened, f"Steps over time, run {number}"),
        "happened": happened,
        "classes": classes(run.confusion) if run.confusion else None,
        "mistakes": mistakes(run.confusion) if run.confusion else [],
    }


def duration(seconds: float) -> str:
    """A time as 90.0 s, 1:02:03 or 1 day, 1:02:03."""
    return f"{seconds:.1f} s" if seconds < 120 else str(timedelta(seconds=round(min(seconds, 1e12))))


def results(run: RunFiles) -> dict[str, float | None]:
    """The numbers of a run, at its end or so far; None: not known yet."""
    train, shares = run.of_kind(Train), sessions.shares(run.marks)
    tests: list[tuple[float | None, float | None]] = [(None, None)]
    tests += [(event.accuracy, event.loss) for event in run.of_kind(Evaluated) if event.part == "test"]
    tests += [(run.summary.test_accuracy, run.summary.test_loss)] if run.summary else []
    accuracy, loss = tests[-1]
    speed = statistics.median(event.images_per_second for event in train)
    return {
        "accuracy": accuracy,
        "test_loss": loss,
        "train_loss": train[-1].loss,
        "epochs": train[-1].epoch,
        "images_per_second": (run.summary and run.summary.images_per_second) or speed,
        "seconds": shares["seconds"],
        "useful": shares[sessions.STEPS],
    }


def hosts_of(run: RunFiles) -> str:
    """The hosts of a run, with their ranks."""
    hosts = Counter(run.config.run.hosts)
    named = ", ".join(f"{host} ({count})" for host, count in list(hosts.items())[:MOST_HOSTS])
    return named + f" and {len(hosts) - MOST_HOSTS} more hosts" * (len(hosts) > MOST_HOSTS)


def settings_of(run: RunFiles) -> dict[str, str]:
    """All settings of a run that have a value."""
    return {name: str(value) for name, value in run.settings.items() if name != "run" and value not in (None, [], "")}


def differing(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Settings, and the number of ranks, that are not the same in all runs: their values by run."""
    every = [{**settings_of(run), "ranks": str(run.config.run.world_size)} for run in runs]
    named = dict.fromkeys(name for one in every for name in one)
    rows = {name: [one.get(name, "") for one in every] for name in named}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def times_of_ranks(run: RunFiles) -> tuple[list[dict[str, Any]], str]:
    """Each rank's mean seconds of a step on the newest set of ranks, the slowest first; and a sentence about it.

    The means are weighted by steps. Without rows for one rank, or without a record.
    """
    every = run.of_kind(Ranks)
    if not every or len(every[-1].hosts) == 1:
        return [], ""
    hosts = every[-1].hosts
    steps = np.maximum(1, np.diff([0, *(one.step for one in every)]))
    same = [i for i, one in enumerate(every) if one.hosts == hosts]
    compute, wait = (
        np.average([getattr(every[i], name) for i in same], axis=0, weights=steps[same]).tolist()
        for name in ("compute_seconds", "wait_seconds")
    )
    rows: list[dict[str, Any]] = [
        {"rank": i, "host": host, "compute": compute[i], "wait": wait[i], "step": compute[i] + wait[i]}
        for i, host in enumerate(hosts)
    ]
    rows.sort(key=lambda row: -row["compute"])
    slowest, usual = rows[0], statistics.median_low(compute)
    where = f" on {slowest['host']}" if slowest["host"] else ""
    behind = f"{slowest['compute'] / usual - 1:.1%} behind the median" if usual else "behind the median"
    own = f"its own part of a step takes {slowest['compute'] * 1e3:.1f} ms"
    return rows, f"Rank {slowest['rank']}{where} is the slowest: {own}, {behind}."


class Classes(NamedTuple):
    """A confusion matrix.

    cells: images, and their percentage of their class (None: the class has no image); none where they do not fit a
    page. pairs: true class, predicted class, images, part of the class.
    """

    cells: list[list[tuple[int, float | None]]]
    pairs: list[tuple[str, str, int, float]]
    accuracy: float


def classes(confusion: Confusion) -> Classes:
    """The matrix, by true class (rows) and predicted class."""
    named, matrix = confusion.class_names, confusion.matrix
    totals = [sum(row) for row in matrix]
    fits = len(named) <= MOST_CLASSES
    cells = [[(n, 100 * n / sum(row) if any(row) else None) for n in row] for row in matrix if fits]
    wrong = [(n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if n and i != j]
    wrong.sort(key=lambda found: (-found[0], found[1:]))
    pairs = [(named[i], named[j], n, n / totals[i]) for n, i, j in wrong[:MOST_PAIRS]]
    return Classes(cells, pairs, sum(row[i] for i, row in enumerate(matrix)) / (sum(totals) or 1))


def mistakes(confusion: Confusion) -> list[tuple[Mistake, list[tuple[str, float]]]]:
    """The worst mistakes, each with the most probable classes and their probabilities."""
    found = []
    for mistake in confusion.mistakes[:MOST_MISTAKES]:
        ranked = sorted(zip(confusion.class_names, mistake.probabilities, strict=True), key=lambda one: -one[1])
        found.append((mistake, ranked[:TOP]))
    return found
