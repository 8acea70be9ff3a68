"""What benchmarks.timeline reads from a profile."""

from __future__ import annotations

import gzip
from pathlib import Path

from benchmarks.timeline import Message, messages
from hvd_cifar.reporting import trace


def test_messages_of_a_step(tmp_path: Path) -> None:
    ms = 1_000_000
    sent = [(10, 11, 40), (50, 50, 60)]
    found = [
        trace.Message(7, (name, 0), *(ms * when for when in times)) for name, times in zip("ab", sent, strict=True)
    ]
    lanes = trace.lanes_of(found, [5 * ms, 70 * ms], 7)
    ranks = [trace.as_json(rank, "a", lanes, [], 0, 10**6)[0] for rank in (0, 1)]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(f'{{"traceEvents": [{",".join(ranks)}]}}'.encode()))
    assert messages(path) == ([Message(6, 35), Message(45, 55)], 45)
