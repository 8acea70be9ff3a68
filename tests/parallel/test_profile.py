"""A profile of real ranks, one of which has a clock that is 5 s off."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

AHEAD = 5  # seconds, of rank 1's clock
FIRST, LAST = 3, 4
MESSAGES = 4  # of a step
# The C library's clock of rank 1, for Python and TensorFlow.
CLOCK = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {{
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  const char *rank = getenv("OMPI_COMM_WORLD_RANK");
  int failed = real(id, now);
  if (id == CLOCK_REALTIME && rank && *rank == '1') now->tv_sec += {AHEAD};
  return failed;
}}
"""
WAY = {"overlap": "on", "bucket_bytes": 2**18}


def _train(data: str, run_dir: str) -> list[list[int]]:
    """Profiles a run; returns comparisons of the clocks, each with the nanoseconds of its shortest barrier."""
    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.distributed import clocks
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.train import train

    common = {"model": "tutorial", "dataset": "synthetic", "data_dir": data, "global_batch_size": 4}
    common |= {"eval_every": 0, "threads_per_rank": 1, "summary_every": 0, "max_steps": LAST}
    common |= {"set": {"warmup_epochs": 0, "learning_rate_factor": 1}, "profile_steps": f"{FIRST}:{LAST}"}
    train(make(TrainSettings, {**common, **WAY, "run_dir": run_dir}))
    shortest: list[int] = []
    between = clocks.between

    def noted(own: Any, root: Any) -> tuple[int, int]:
        shortest.append(min(mine[1] - mine[0] + other[1] - other[0] for mine, other in zip(own, root, strict=True)))
        return between(own, root)

    with session(1), mock.patch.object(clocks, "between", noted):  # the running one
        return [[*clocks.compare()[1:], shortest[-1]] for _ in range(5)]


def test_one_trace_of_two_clocks(embedded: Path, tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library)}
    own, other = run_ranks(_train, 2, str(embedded), str(tmp_path / "run"), env=env, timeout=400)

    assert all(ahead == uncertainty == 0 for ahead, uncertainty, _ in own)
    errors = [abs(ahead - AHEAD * 10**9) for ahead, _, _ in other]
    assert all(error <= uncertainty for error, (_, uncertainty, _) in zip(errors, other, strict=True))
    assert all(uncertainty <= shortest // 2 + 1 for _, uncertainty, shortest in other)  # on a busy machine also
    run_dir, name = tmp_path / "run", f"steps-{FIRST}-{LAST}"
    assert [path.name for path in (run_dir / "profile").iterdir()] == [f"{name}.json.gz"]
    _check_trace(run_dir / f"profile/{name}.json.gz")


def _check_trace(path: Path) -> None:
    whole = json.loads(gzip.decompress(path.read_bytes()))
    facts = whole["otherData"]["ranks"]
    uncertainty = facts[1]["clock_uncertainty_seconds"]
    assert facts[1]["clock_ahead_seconds"] == pytest.approx(AHEAD, abs=uncertainty) and facts[1]["events_left_out"] == 0
    names: dict[str, dict[Any, str]] = defaultdict(dict)
    lanes: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in whole["traceEvents"]:
        key = (event["pid"], event["tid"])
        if event["ph"] == "M":
            names[event["name"]][key] = event["args"].get("name", "")
        else:
            assert event["ph"] == "X" and event["name"] and event["dur"] >= 0
            lanes[event["pid"], names["thread_name"][key]].append(event)
    assert names["process_name"] == {(r, 0): f"rank {r} on {facts[r]['host']}" for r in (0, 1)}

    for events in lanes.values():  # each within the one that it begins in
        ends: list[float] = []
        for event in events:
            while ends and event["ts"] >= ends[-1] - 1e-4:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-4, event
            ends.append(event["ts"] + event["dur"])
    for rank in (0, 1):
        steps = lanes[rank, "steps"]
        assert [event["name"] for event in steps] == [f"step {step}" for step in range(FIRST, LAST + 1)]
    times = [fact["hidden_and_communication_seconds"] for fact in facts]
    assert all(0 <= hidden < total for hidden, total in times)
    # Of a rank that is faster than the other nothing is hidden.
    assert sum(hidden for hidden, _ in times) > 0
    for place in range(1, MESSAGES + 1):
        sent = [[e for e in lanes[rank, f"message {place}"] if e["name"].startswith("Horovod")] for rank in (0, 1)]
        assert len(sent[0]) == len(sent[1]) == LAST - FIRST + 1
        for pair in zip(*sent, strict=True):
            # No rank has the sum before both have given their part: one time base.
            given, back = max(e["ts"] for e in pair), min(e["ts"] + e["dur"] for e in pair)
            assert given <= back + 1e6 * uncertainty
    assert any("Conv2DBackprop" in event["name"] for event in sum(lanes.values(), []))
