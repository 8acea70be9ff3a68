"""Results as tables for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hvd_cifar.tools.benchmark.results import AllreduceResult, Estimate, Facts, StepResult


def plain(estimate: Estimate, digits: int, factor: float = 1.0) -> str:
    """Mean and standard error: 12.3 ± 0.1."""
    error = estimate.standard_error
    spread = "" if error is None else f" ± {error * factor:,.{digits}f}"
    return f"{estimate.mean * factor:,.{digits}f}{spread}"


def of_step(found: StepResult) -> str:
    """Speed and efficiency, and the parts of a step's time."""
    slowest = max(found.compute_by_rank)
    rank, behind = found.compute_by_rank.index(slowest), slowest / statistics.median_low(found.compute_by_rank) - 1
    among_ranks = len(found.compute_by_rank) > 1
    rows = {
        "images/s": plain(found.images_per_second, 0),
        "images/s without communication": plain(found.images_per_second_alone, 0),
        "efficiency": plain(found.efficiency, 3),
        "slowest rank": f"{rank} on {found.facts.hosts[rank]}, {behind:.1%} behind the median" if among_ranks else "",
        "step, ms": plain(found.step_seconds, 2, 1e3),
        "computation alone, ms": plain(found.compute_seconds, 2, 1e3),
        "all-reduce alone, ms": plain(found.communication_seconds, 2, 1e3) if found.communication_seconds else "",
        "exposed, ms": f"{(found.step_seconds.mean - slowest) * 1e3:.2f}" if among_ranks else "",
        "fed, ms": plain(found.fed_seconds, 2, 1e3),
        "input costs": plain(found.input_cost, 1, 100) + "%",
    }
    width = max(map(len, rows))
    sent = "in one message" if found.bucket_bytes is None else f"in buckets of {found.bucket_bytes / 2**10:,.0f} KiB"
    return "\n".join(
        [
            f"{found.model}, {found.precision}, {found.per_rank_batch_size} images a rank and step; {found.dataset}; "
            f"mean ± standard error of {found.step_seconds.n} x {found.steps} steps",
            *(f"  {name:<{width}}  {value}" for name, value in rows.items() if value),
            f"gradients leave {sent}; compression: {found.compression}",
            _about(found.facts),
        ]
    )


def of_allreduce(found: AllreduceResult) -> str:
    """A row a size."""
    rows: list[Sequence[str]] = [("bytes", "us", "algorithm GB/s", "bus GB/s", "wrong")]
    for p in found.points:
        rates = (f"{rate / 1e9:.3f}" for rate in (p.algorithm_bandwidth, p.bus_bandwidth))
        rows.append((f"{p.bytes:,}", plain(p.seconds, 1, 1e6), *rates, str(p.wrong_values)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["all-reduce of float32", *lines, _about(found.facts)])


def _about(facts: Facts) -> str:
    names = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return f"{facts.ranks}; {facts.processor}, {facts.cores} cores; {names}"
