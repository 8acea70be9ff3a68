"""Results as tables for a terminal."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from hvd_cifar.tools.benchmark.results import AllreduceResult, Estimate, Facts, StepResult, WorldResult

WIDTH = 200  # of the widest table; a terminal's own width would cut columns off


def plain(estimate: Estimate, digits: int, factor: float = 1.0) -> str:
    """Mean and standard error: 12.3 ± 0.1."""
    error = estimate.standard_error
    spread = "" if error is None else f" ± {error * factor:,.{digits}f}"
    return f"{estimate.mean * factor:,.{digits}f}{spread}"


def of_step(found: StepResult) -> str:
    """Speed and efficiency by number of ranks, and the parts of a step's time."""
    n = found.worlds[0].step_seconds.n
    title = f"{found.model}, {found.precision}, {found.per_rank_batch_size} images a rank and step; {found.dataset}; "
    speed = {
        str(w.ranks): {
            "images/s": plain(w.images_per_second, 0),
            "images/s without communication": plain(w.images_per_second_alone, 0),
            "efficiency": plain(w.efficiency, 3),
            "slowest rank": _slowest(w, found.facts),
        }
        for w in found.worlds
    }
    parts = {
        str(w.ranks): {
            "step": plain(w.step_seconds, 2, 1e3),
            "computation alone": plain(w.compute_seconds, 2, 1e3),
            "of the slowest": plain(w.lockstep_seconds, 2, 1e3),
            "all-reduce alone": plain(w.communication_seconds, 2, 1e3) if w.communication_seconds else "",
            "exposed": f"{(w.step_seconds.mean - w.lockstep_seconds.mean) * 1e3:.2f}" if w.ranks > 1 else "",
            "fed": plain(w.fed_seconds, 2, 1e3),
            "costs": plain(w.input_cost, 1, 100) + "%",
        }
        for w in found.worlds
    }
    p, size = found.phases, found.bucket_bytes
    sent = "in one message" if size is None else f"in buckets of {size / 2**10:,.0f} KiB"
    return _text(
        (f"{title}mean ± standard error of {n} x {found.steps} steps", "ranks", speed),
        ("milliseconds a step", "ranks", parts),
        _facts(found.facts),
        f"gradients leave {sent}; compression: {found.compression}",
        f"computation on {found.worlds[-1].ranks} ranks: forward {p.forward_seconds * 1e3:.2f} ms, backward "
        f"{p.backward_seconds * 1e3:.2f} ms, update {p.update_seconds * 1e3:.2f} ms; gradients of "
        f"{sum(g.bytes for g in p.gradients) / 2**20:.2f} MiB in {len(p.gradients)} variables",
    )


def of_allreduce(found: AllreduceResult) -> str:
    """A table for each number of ranks, with a row a size."""
    tables = []
    for ranks in sorted({p.ranks for p in found.points}):
        rows = {
            f"{p.bytes:,}": {
                "us": plain(p.seconds, 1, 1e6),
                "algorithm GB/s": f"{p.algorithm_bandwidth / 1e9:.3f}",
                "bus GB/s": f"{p.bus_bandwidth / 1e9:.3f}",
                "wrong": f"{p.wrong_values}",
            }
            for p in sorted((p for p in found.points if p.ranks == ranks), key=lambda p: p.bytes)
        }
        tables.append((f"all-reduce of float32 over {ranks} ranks", "bytes", rows))
    return _text(*tables, _facts(found.facts))


def _slowest(world: WorldResult, facts: Facts) -> str:
    if world.ranks == 1:
        return ""
    return f"{world.slowest} on {facts.hosts[world.slowest]}, {world.slowest_behind:.1%} behind the median"


def _facts(facts: Facts) -> str:
    hosts = facts.local_ranks.count(0) or len(set(facts.hosts))
    where = f"{len(facts.hosts)} rank{'s' * (len(facts.hosts) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    names = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    how = f" ({facts.algorithm}; {facts.transport})" if facts.algorithm and len(facts.hosts) > 1 else ""
    return f"{where}, {facts.processor}, {facts.cores} cores, over {facts.controller}{how}; {names}"


def _text(*parts: str | tuple[str, str, dict[str, dict[str, str]]]) -> str:
    """Lines and tables. A table: its title, the name of its first column, and its rows, each of cells by column."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        title = part if isinstance(part, str) else part[0]
        console.print(title, markup=False, soft_wrap=True)
        if isinstance(part, str):
            continue
        table = Table(box=box.SIMPLE_HEAD, header_style="")
        _, first, rows = part
        for column in (first, *next(iter(rows.values()))):
            table.add_column(column, justify="left" if column == "slowest rank" else "right", no_wrap=True)
        for name, cells in rows.items():
            table.add_row(name, *cells.values())
        console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
