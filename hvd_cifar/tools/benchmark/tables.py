"""Results as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hvd_cifar.tools.benchmark.fits import LEAST_BYTES, Fit
from hvd_cifar.tools.benchmark.results import (
    AllreduceResult,
    EmulatedResult,
    Estimate,
    Facts,
    FeedResult,
    InputResult,
    Memory,
    PredictResult,
    StepResult,
)

WIDTH = 200  # of the widest table; a terminal's own width would cut columns off
RANKS_SHOWN = 16
ROUGH = 0.5  # above this median error a fit says little about the network
WAY_NAMES = {"horovod": "Horovod", "mpi": "MPI", "copy": "copy"}


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
        slowest = f"{w.slowest.rank} on {w.slowest.host}, {w.slowest.behind_median:.1%} behind the median"
        speed.add_row(
            str(w.ranks),
            plain(w.images_per_second, 0),
            plain(w.images_per_second_alone, 0),
            plain(w.efficiency, 3),
            slowest if w.ranks > 1 else "",
        )
    parts = _table(
        "milliseconds a step",
        [
            "ranks",
            "step",
            "computation alone",
            "of the slowest",
            "all-reduce alone",
            "exposed",
            "input alone",
            "fed",
            "costs",
        ],
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
    parts_of = {
        "computation": most.compute_seconds_by_rank,
        "all-reduce": most.communication_seconds_by_rank,
        "both: a step": most.step_seconds_by_rank,
        "input": most.input_seconds_by_rank,
    }
    columns = [f"{name}, ms" for name in parts_of]
    by_rank = _table("by rank", ["rank", "host", *columns, "memory, MiB", "PSS, MiB"])
    shown = sorted(range(most.ranks), key=lambda rank: -most.compute_seconds_by_rank[rank])[:RANKS_SHOWN]
    for rank in sorted(shown):
        resident, proportional = _mebibytes(found.memory_by_rank[rank])
        by_rank.add_row(
            str(rank),
            found.facts.hosts[rank],
            *(f"{seconds[rank] * 1e3:.2f}" if seconds else "" for seconds in parts_of.values()),
            resident,
            proportional,
        )
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
    if found.waiting_cpu is not None:
        lines.append(f"ranks that waited took {found.waiting_cpu:.0%} of a core each")
    return _text(speed, parts, by_rank, lines)


def of_emulated(found: EmulatedResult) -> str:
    """Times, processor time and traffic of an emulated step, by number of ranks."""
    columns = ["step", "alone", "the rest", "message alone", "value alone", "MPI alone", "processor", "processor alone"]
    table = _table(
        f"{found.model}, a sleep of {found.emulated_seconds * 1e3:g} ms for its computation; milliseconds, "
        f"mean ± standard error of {found.worlds[0].step_seconds.n} x {found.steps} steps",
        ["ranks", *columns, "kB sent", "packets"],
    )
    for w in found.worlds:
        times = [w.step_seconds, w.alone_seconds, w.rest_seconds, w.message_seconds, w.value_seconds, w.ring_seconds]
        times += [w.step_processor, w.alone_processor]
        texts = [plain(estimate, 2, 1e3) if estimate else "" for estimate in times]
        table.add_row(str(w.ranks), *texts, f"{w.sent_bytes / 1e3:,.1f}", f"{w.sent_packets:,.1f}")
    return _text(
        table,
        [_facts(found.facts), f"gradients of {sum(found.gradients) / 2**20:.2f} MiB; {_buckets(found.bucket_bytes)}"],
    )


def of_allreduce(found: AllreduceResult) -> str:
    """A table for each number of ranks, with a row a size; and the fits."""
    tables = []
    for ranks in sorted({p.ranks for p in found.points}):
        points = {(p.way, p.bytes): p for p in found.points if p.ranks == ranks}
        ways = [way for way in WAY_NAMES if any(w == way for w, _ in points)]
        columns = ["bytes"]
        for way in ways:
            bandwidths = ["GB/s"] if way == "copy" else ["algorithm GB/s", "bus GB/s", "wrong"]
            columns += [f"{WAY_NAMES[way]}: us", *bandwidths]
        table = _table(f"all-reduce of float32 over {ranks} ranks", columns)
        for size in sorted({size for _, size in points}):
            row = [f"{size:,}"]
            for way in ways:
                p = points[way, size]  # type: ignore[index]
                row += [plain(p.seconds, 1, 1e6), f"{p.algorithm_bandwidth / 1e9:.3f}"]
                row += [] if way == "copy" else [f"{p.bus_bandwidth / 1e9:.3f}", str(p.wrong_values)]
            table.add_row(*row)
        tables.append(table)
    fitted = [way for way in WAY_NAMES if way != "copy" and any(p.way == way for p in found.points)]
    fits = [f"{WAY_NAMES[way]}: {_fit(found.fits.get(way))}" for way in fitted]
    skipped = [f"{WAY_NAMES[way]} was left out: {reason}" for way, reason in found.skipped.items()]
    formula = (
        f"all-reduces of {LEAST_BYTES:,} bytes and more, fitted, on H hosts of L ranks: seconds = start + "
        "2 (H - 1) alpha + 2 (H - 1) / H * bytes / bandwidth, and the same of L within a host:"
    )
    return _text(*tables, [_facts(found.facts), formula, *fits, *skipped])


def of_input(found: InputResult) -> str:
    """Speed, processor time and memory of each way to feed the ranks, and how often it used the examples."""
    height, width, channels = found.image_shape
    n = found.ways[0].images_per_second.n
    speed = _table(
        f"{found.dataset}, {found.examples:,} images, as {found.model} sees them: {height} x {width} x {channels}, "
        f"float32; {found.per_rank_batch_size} a rank and step; mean ± standard error of {n} epochs without training",
        ["", "images/s", "processor s per 1,000", "of rank 0", "rank 0 holds, MiB", "another, MiB"],
    )
    seen = _table(
        "examples of the training set in one epoch, over all ranks",
        ["", "never", "once", "twice or more", "by one rank", "by several ranks"],
    )
    for way in found.ways:
        speed.add_row(
            way.way,
            plain(way.images_per_second, 0),
            plain(way.processor_seconds, 3),
            plain(way.processor_seconds_by_rank[0], 3),
            f"{way.held_by_rank[0] / 2**20:,.1f}",
            f"{max(way.held_by_rank[1:]) / 2**20:,.1f}",
        )
        seen.add_row(way.way, *_uses(way, found.examples))
    ranks = len(found.facts.hosts)
    expected = (1 - 1 / ranks) ** ranks
    theory = f"expected never of drawn, on N = {ranks} ranks: (1 - 1/N)^N = {expected:.2%}"
    most = max(found.memory_by_rank, key=lambda memory: memory.resident)
    memory = "memory of the largest rank's process: {} MiB, PSS {}".format(*_mebibytes(most))
    return _text(speed, seen, [theory, memory, _facts(found.facts)])


def _uses(way: FeedResult, examples: int) -> list[str]:
    """Examples used never, once and more often, by one rank and by several: mean count of an epoch, and percentage."""
    epochs = [(e.never, e.once, e.more, e.by_ranks[1], sum(e.by_ranks[2:])) for e in way.epochs]
    means = [sum(counts) / len(epochs) for counts in zip(*epochs, strict=True)]
    return [f"{mean:,.0f} ({mean / examples:.1%})" for mean in means]


def of_predict(found: PredictResult) -> str:
    """Predicted beside measured, and predictions."""
    step = found.step
    if isinstance(step, EmulatedResult):
        what = f"a sleep of {step.emulated_seconds * 1e3:g} ms for its computation"
    else:
        what = f"{step.precision}, {step.per_rank_batch_size} images a rank, compression {step.compression}"
    checks = _table(
        f"{step.model}, {what}: efficiency",
        ["ranks", "hosts", "measured", "predicted from", "predicted", "error", "step, ms", "gradients leave"],
    )
    for p in found.checks:
        assert p.measured is not None and p.error is not None
        measured = Estimate(mean=p.measured, standard_error=p.measured_standard_error, n=0)
        checks.add_row(
            str(p.ranks),
            str(p.hosts),
            plain(measured, 3),
            f"{p.measured_on} ranks",
            f"{p.efficiency:.3f}",
            f"{p.error:+.1%}",
            f"{p.step_seconds * 1e3:.2f}",
            _buckets(p.bucket_bytes),
        )
    predictions = _table(
        "efficiency to expect",
        ["ranks", "hosts", "all-reduce, ms", "step, ms", "efficiency", "in one message", "gradients leave"],
    )
    for p in found.predictions:
        times = [f"{seconds * 1e3:.2f}" for seconds in (p.communication_seconds, p.step_seconds)]
        fractions = [f"{fraction:.3f}" for fraction in (p.efficiency, p.efficiency_in_one_message)]
        predictions.add_row(str(p.ranks), str(p.hosts), *times, *fractions, _buckets(p.bucket_bytes))
    allreduce = found.allreduce
    lines = [f"all-reduce as measured: {_fit(allreduce.fits['horovod'])}"]
    if found.link_fit != allreduce.fits["horovod"]:
        lines.append(f"all-reduce of the predictions: {_fit(found.link_fit)}")
    lines += _beyond(found)
    lines += [f"the step: {_facts(step.facts)}", f"all-reduces: {_facts(allreduce.facts)}"]
    one, other = step.facts, allreduce.facts
    differ = [name for name in ("processor", "device", "controller") if getattr(one, name) != getattr(other, name)]
    if {*one.hosts} != {*other.hosts}:
        differ.insert(0, "hosts")
    if differ:
        lines.append(f"THE TWO MEASUREMENTS DIFFER ({', '.join(differ)}): the checks say little")
    return _text(checks, predictions, lines)


def _buckets(size: int | None) -> str:
    return "in one message" if size is None else f"in buckets of {size / 2**10:,.0f} KiB"


def _beyond(found: PredictResult) -> list[str]:
    """Warnings where the predictions go beyond the measured all-reduces."""
    unknown, lines = found.link_fit.unknown, []
    if any(p.hosts > 1 for p in found.predictions):
        if "beta" in unknown:
            lines.append(
                "THE LINK IS NOT KNOWN from all-reduces on one host, and taken to cost nothing: measure on several "
                "hosts, or give --link and --latency"
            )
        elif "alpha" in unknown:
            lines.append(
                "ALPHA IS NOT KNOWN from all-reduces on one number of hosts, and taken as 0: more hosts are slower "
                "than predicted; measure on several numbers of hosts, or give --latency"
            )
    if {"local_beta", "local_alpha"} <= {*unknown} and any(p.ranks > p.hosts for p in found.predictions):
        lines.append(
            "A HOST'S INSIDE IS NOT KNOWN from all-reduces of one rank on each host, and taken to cost nothing: "
            "measure with several ranks on a host"
        )
    sent = sum(found.step.gradients) if isinstance(found.step, EmulatedResult) else sum(found.step.messages)
    most = max(p.bytes for p in found.allreduce.points if p.way == "horovod")
    if sent > most:
        lines.append(
            f"THE GRADIENTS ARE LONGER than the longest all-reduce measured, {most:,} bytes: "
            "measure with a larger --max-bytes"
        )
    return lines


def _fit(fit: Fit | None) -> str:
    if fit is None:
        return "not fitted, since a fit needs at least two sizes and two ranks"
    levels = [("alpha", fit.alpha, "bandwidth", fit.beta, "beta")]
    levels.append(("alpha within a host", fit.local_alpha, "bandwidth within a host", fit.local_beta, "local_beta"))
    parts = [] if "start" in fit.unknown else [f"start {fit.start * 1e6:.1f} us"]
    for alpha, seconds, bandwidth, beta, name in levels:
        if name in fit.unknown:
            continue
        if name.replace("beta", "alpha") not in fit.unknown:
            parts.append(f"{alpha} {seconds * 1e6:.1f} us")
        parts.append(f"{bandwidth} {1 / beta / 1e9:.3f} GB/s" if beta else f"{bandwidth} too high to tell")
    text = ", ".join(parts)
    if fit.errors:
        median, largest = f"{fit.median_error:.0%}", f"{fit.largest_error:.0%}"
        text += f"; off by {median} (median) and {largest} (most) of {len(fit.errors)} times"
        if fit.median_error > ROUGH:
            text += ": THE FORMULA FITS BADLY, and predictions from it say little"
    return text


def _facts(facts: Facts) -> str:
    hosts = facts.local_ranks.count(0) or len(set(facts.hosts))
    where = f"{len(facts.hosts)} rank{'s' * (len(facts.hosts) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    names = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    how = f" ({facts.algorithm}; {facts.transport})" if facts.algorithm and len(facts.hosts) > 1 else ""
    return f"{where}, {facts.processor}, {facts.cores} cores, over {facts.controller}{how}; {names}"


def _mebibytes(memory: Memory) -> tuple[str, str]:
    own = "not known" if memory.proportional is None else f"{memory.proportional / 2**20:,.0f}"
    return f"{memory.resident / 2**20:,.0f}", own


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
