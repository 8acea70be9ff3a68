"""The numbers and words of a report, apart from charts and HTML. Pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvd_cifar.reporting import goodput, story
from hvd_cifar.reporting.run_files import Confusion, Evaluated, Mistake, Ranks, RunFiles, Train, last_sign
from hvd_cifar.reporting.story import Happening
from hvd_cifar.reporting.view import clock

MOST_HOSTS = 8  # by name
MOST_RANKS = 16  # in the table of ranks: the slowest
MOST_CLASSES = 20  # of a confusion matrix that fits a page
MOST_PAIRS = 10  # of a true and a predicted class that are confused
MOST_MISTAKES = 20
TOP = 3  # classes of a mistake
MOST_HAPPENINGS = 100


def duration(seconds: float) -> str:
    """A time in words that fit a table."""
    return f"{seconds:.1f} s" if seconds < 120 else clock(seconds)


def results(run: RunFiles) -> dict[str, float | None]:
    """The numbers of a run, at its end or so far; None: not known yet."""
    train, shares = run.of_kind(Train), goodput.shares(run.marks)
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
        "useful": shares["useful_steps"],
    }


def facts(run: RunFiles) -> dict[str, str]:
    """The net, data, ranks, device and versions of a run."""
    ran, config = run.config.run, run.config
    hosts = Counter(ran.hosts)
    where = ", ".join(f"{host} ({count})" for host, count in list(hosts.items())[:MOST_HOSTS])
    where += f" and {len(hosts) - MOST_HOSTS} more hosts" * (len(hosts) > MOST_HOSTS)
    found = {
        "Net": f"{config.model}, {config.precision or 'float32'}",
        "Data": ran.dataset,
        "Ranks": f"{ran.world_size}: {where}",
        "Device": f"{ran.device}, {ran.threads} thread{'s' * (ran.threads != 1)} a rank, over {ran.controller}",
        "Global batch": f"{config.global_batch_size:,}",
        "Seed": str(config.seed),
        "Started": story.clock(run.marks[0]["time"]) if run.marks else "",
        "Command": ran.command,
        "Code": f"hvd_cifar {ran.hvd_cifar}" + (f", commit {ran.git_commit}" if ran.git_commit else ""),
        "Versions": ", ".join(f"{name} {version}" for name, version in ran.versions.items()),
        "Folder": str(run.run_dir),
    }
    return {name: value for name, value in found.items() if value}


def settings(run: RunFiles) -> dict[str, str]:
    """All settings of a run that have a value."""
    return {name: str(value) for name, value in run.settings.items() if name != "run" and value not in (None, [], "")}


def differing(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Settings, and the number of ranks, that are not the same in all runs: their values by run."""
    every = [{**settings(run), "ranks": str(run.config.run.world_size)} for run in runs]
    named = dict.fromkeys(name for one in every for name in one)
    rows = {name: [one.get(name, "") for one in every] for name in named}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def shares(run: RunFiles) -> list[tuple[int, str, float, str]]:
    """Where the wall time went, the largest first: number in `goodput.KINDS`, name, fraction, duration."""
    found = goodput.shares(run.marks)
    rows = [
        (number, kind.replace("_", " "), found[kind], duration(found[kind] * found["seconds"]))
        for number, kind in enumerate(goodput.KINDS)
        if found[kind]
    ]
    return sorted(rows, key=lambda row: -row[2])


class OfRank(NamedTuple):
    """A rank's mean times of a step, in seconds."""

    rank: int
    host: str
    compute: float
    wait: float

    @property
    def step(self) -> float:
        """Of the whole step."""
        return self.compute + self.wait


def by_rank(run: RunFiles) -> tuple[list[OfRank], str]:
    """Each rank's mean times on the newest set of ranks, weighted by steps, the slowest first; and a sentence about it.

    Without rows for one rank, or without a record.
    """
    every = run.of_kind(Ranks)
    if not every or len(every[-1].compute_seconds) == 1:
        return [], ""
    count, hosts = len(every[-1].compute_seconds), every[-1].hosts
    steps = np.maximum(1, np.diff([0, *(one.step for one in every)]))
    same = [i for i, one in enumerate(every) if (len(one.compute_seconds), one.hosts) == (count, hosts)]
    compute, wait = (
        np.average([getattr(every[i], name) for i in same], axis=0, weights=steps[same]).tolist()
        for name in ("compute_seconds", "wait_seconds")
    )
    rows = [OfRank(*row) for row in zip(range(count), hosts, compute, wait, strict=True)]
    rows.sort(key=lambda row: -row.compute)
    usual, where = statistics.median_low(compute), f" on {rows[0].host}" if rows[0].host else ""
    behind = f"{rows[0].compute / usual - 1:.1%} behind the median" if usual else "behind the median"
    own = f"its own part of a step takes {rows[0].compute * 1e3:.1f} ms"
    return rows, f"Rank {rows[0].rank}{where} is the slowest: {own}, {behind}."


def happenings(run: RunFiles) -> list[Happening]:
    """What happened; for a run that was cut off, which has no mark of its end, also that.

    Of many, the first and the newest.
    """
    found = story.happenings(run.marks)
    if run.standing.word == "cut off":
        last = run.marks[-1] if run.marks else {}
        seen = last.get("time", last_sign(run.run_dir))
        found.append(Happening("failure", seen, last.get("step"), run.standing.text))
    return found if len(found) <= MOST_HAPPENINGS else [found[0], *found[1 - MOST_HAPPENINGS :]]


class Classes(NamedTuple):
    """A confusion matrix.

    cells: images, and their percentage of their class (None: the class has no image); none where they do not fit a
    page. pairs: true class, predicted class, images, part of the class.
    """

    names: list[str]
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
    return Classes(named, cells, pairs, sum(row[i] for i, row in enumerate(matrix)) / (sum(totals) or 1))


def pictures(confusion: Confusion) -> list[tuple[Mistake, str, list[tuple[str, float]]]]:
    """The worst mistakes, each with the name of its class, and the most probable classes with their probabilities."""
    named = confusion.class_names
    found = []
    for mistake in confusion.mistakes[:MOST_MISTAKES]:
        ranked = sorted(zip(named, mistake.probabilities, strict=True), key=lambda one: -one[1])
        found.append((mistake, named[mistake.label], ranked[:TOP]))
    return found
