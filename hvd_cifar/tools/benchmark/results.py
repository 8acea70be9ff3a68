"""Results of the benchmarks, as values of JSON. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_text
from hvd_cifar.reporting import provenance, terminal
from hvd_cifar.runtime.world import World, versions

Result = dict[str, Any]


def estimate(values: Sequence[float]) -> Result:
    """The mean of n repeats, and its standard error: None for one repeat."""
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error, "n": n}


def shown(found: Result, digits: int, factor: float = 1.0) -> str:
    """An `estimate`: 12.3 ± 0.1."""
    error = found["standard_error"]
    spread = "" if error is None else f" ± {error * factor:,.{digits}f}"
    return f"{found['mean'] * factor:,.{digits}f}{spread}"


def facts(world: World) -> Result:
    """Where and when this job measures: versions, ranks, hosts by rank, this rank's GPU or CPU, and cores."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": provenance.command(),
        "git_commit": provenance.git_commit() if world.is_root else None,
        "versions": versions(),
        "ranks": world.describe(),
        "processor": world.ranks[world.rank].processor,
        "cores": len(os.sched_getaffinity(0)),
        "hosts": [rank.host for rank in world.ranks],
    }


def tell(table: str, found: Result, path: Path | None) -> None:
    """Print a result, and write it as JSON where `path` is given; for rank 0. UserError where it cannot be written."""
    about = found["facts"]
    names = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    terminal.say(f"{table}\n{about['ranks']}; {about['processor']}, {about['cores']} cores; {names}")
    try:
        if path:
            replace_text(path, json.dumps(found, indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give a file that can be written") from None
