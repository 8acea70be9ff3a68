"""Results as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hvd_cifar.tools.benchmark.results import AllreduceResult, Estimate, Facts, StepResult

WIDTH = 200  # of the widest table; a terminal's own width would cut columns off
RANKS_SHOWN = 16
INPUT_COLUMNS = ("input alone", "fed", "costs")
WAY_NAMES = {"horovod": "Horovod", "mpi": "MPI"}


def plain(estimate: Estimate, digits: int, factor: float = 1.0) -> str:
    """Mean and standard error: 12.3 ± 0.1."""
    text = f"{estimate.mean * factor:,.{digits}f}"
    if estimate.standard_error is None:
        return text
    return f"{text} ± {estimate.standard_error * factor:,.{digits}f}"


def of_step(found: StepResult) -> str:
    """Speed and efficiency by number of ranks, the parts of a step's time, and times by rank."""
    n = found.worlds[0].step_seconds.n
    speed = _table(
        f"{found.model}, {found.precision}, {found.per_rank_batch_size} images a rank and step; {found.dataset}; "
        f"mean ± standard error of {n} x {found.steps} steps",
        ["ranks", "images/s", "images/s without communication", "efficiency", "slowest rank"],
    )
    for w in found.worlds:
        slowest = f"{w.slowest.rank} on {w.slowest.host}, {w.slowest_behind:.1%} behind the median"
        speed.add_row(
            str(w.ranks),
            plain(w.images_per_second, 0),
            plain(w.images_per_second_alone, 0),
            plain(w.efficiency, 3),
            slowest if w.ranks > 1 else "",
        )
    parts = _table(
        "milliseconds a step",
        ["ranks", "step", "computation alone", "of the slowest", "all-reduce alone", "exposed", *INPUT_COLUMNS],
    )
    for w in found.worlds:
        alone = w.communication_seconds
        parts.add_row(
            str(w.ranks),
            plain(w.step_seconds, 2, 1e3),
            plain(w.compute_seconds, 2, 1e3),
            plain(w.lockstep_seconds, 2, 1e3),
            plain(alone, 2, 1e3) if alone else "",
            f"{(w.step_seconds.mean - w.lockstep_seconds.mean) * 1e3:.2f}" if alone else "",
            plain(w.input_seconds, 2, 1e3),
            plain(w.fed_seconds, 2, 1e3),
            plain(w.input_cost, 1, 100) + "%",
        )
    most = found.worlds[-1]
    columns = [f"{name}, ms" for name in ("computation", "all-reduce", "both: a step", "input")]
    by_rank = _table("by rank", ["rank", "host", *columns])
    shown = sorted(most.by_rank, key=lambda of_rank: -of_rank.compute_seconds)[:RANKS_SHOWN]
    for r in sorted(shown, key=lambda of_rank: of_rank.rank):
        times = (r.compute_seconds, r.communication_seconds, r.step_seconds, r.input_seconds)
        texts = ["" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in times]
        by_rank.add_row(str(r.rank), r.host, *texts)
    lines = [_facts(found.facts)]
    lines.append(f"{_buckets(found.bucket_bytes)}; compression: {found.compression}")
    p = found.phases
    lines.append(
        f"computation on {most.ranks} ranks: forward {p.forward_seconds * 1e3:.2f} ms, backward "
        f"{p.backward_seconds * 1e3:.2f} ms, update {p.update_seconds * 1e3:.2f} ms; gradients of "
        f"{sum(g.bytes for g in p.gradients) / 2**20:.2f} MiB in {len(p.gradients)} variables"
    )
    if most.ranks > RANKS_SHOWN:
        lines.append(f"the {RANKS_SHOWN} slowest ranks of {most.ranks} are shown; all are in the JSON file")
    return _text(speed, parts, by_rank, lines)


def of_allreduce(found: AllreduceResult) -> str:
    """A table for each number of ranks, with a row a size."""
    tables = []
    for ranks in sorted({p.ranks for p in found.points}):
        points = {(p.way, p.bytes): p for p in found.points if p.ranks == ranks}
        ways = [way for way in WAY_NAMES if any(w == way for w, _ in points)]
        columns = ["bytes"]
        for way in ways:
            columns += [f"{WAY_NAMES[way]}: us", "algorithm GB/s", "bus GB/s", "wrong"]
        table = _table(f"all-reduce of float32 over {ranks} ranks", columns)
        for size in sorted({size for _, size in points}):
            row = [f"{size:,}"]
            for way in ways:
                p = points[way, size]  # type: ignore[index]
                bandwidths = [f"{each / 1e9:.3f}" for each in (p.algorithm_bandwidth, p.bus_bandwidth)]
                row += [plain(p.seconds, 1, 1e6), *bandwidths, str(p.wrong_values)]
            table.add_row(*row)
        tables.append(table)
    skipped = [f"{WAY_NAMES[way]} was left out: {reason}" for way, reason in found.skipped.items()]
    return _text(*tables, [_facts(found.facts), *skipped])


def _buckets(size: int | None) -> str:
    return "in one message" if size is None else f"in buckets of {size / 2**10:,.0f} KiB"


def _facts(facts: Facts) -> str:
    hosts = facts.local_ranks.count(0) or len(set(facts.hosts))
    where = f"{len(facts.hosts)} rank{'s' * (len(facts.hosts) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    names = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    how = f" ({facts.algorithm}; {facts.transport})" if facts.algorithm and len(facts.hosts) > 1 else ""
    return f"{where}, {facts.processor}, {facts.cores} cores, over {facts.controller}{how}; {names}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, header_style="")
    for column in columns:
        left = column in ("slowest rank", "host", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table


def _text(*parts: Table | Sequence[str]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        if isinstance(part, Table):
            console.print(part.title, markup=False, soft_wrap=True)
            part.title = None  # which rich would break at the table's width
            console.print(part)
        else:
            for line in part:
                console.print(line, markup=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
