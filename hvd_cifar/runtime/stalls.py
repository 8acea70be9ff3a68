"""Which rank holds up a run: the ranks' status, the time-out, the verdict, and the line that names a rank.

Standard library only: the launcher reads the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOOR = 60.0  # s: a shorter time-out would take a busy machine for a hang
FACTOR = 10.0  # longest recent durations in a time-out; or floors, for a phase that has not been seen yet
SLACK = 0.9  # part of the time-out after which a rank is late: ranks do not begin a phase at exactly the same time
PATIENCE = 5.0  # time-outs after which a rank that cannot ask the others ends the run


@dataclass(frozen=True)
class Status:
    """What a rank reports about itself.

    Attributes:
        step: the step that it makes; phase: what it does; position: phases it has begun, the same on all ranks that
            are at the same place.
        idle: seconds since it began the phase, or gave a sign of life in it.
        waits: whether it waits for other ranks, in a collective.
    """

    rank: int
    host: str
    step: int
    phase: str
    position: int
    idle: float
    waits: bool


@dataclass(frozen=True)
class Lost:
    """A rank that the run cannot go on with. Its text is the machine-readable line; `lost_ranks` reads it."""

    rank: int
    host: str
    step: int
    phase: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} hangs at step {self.step} ({self.phase}): {self.reason}"


_LOST = re.compile(r"\brank (\d+) on (\S+) hangs at step (\d+) \(([^)\n]*)\): ([^\n]*)")


def lost_ranks(text: str) -> list[Lost]:
    """The ranks that lines of a job's stderr name as lost, each once."""
    found = [Lost(int(m[1]), m[2], int(m[3]), m[4], m[5]) for m in _LOST.finditer(text)]
    return list({lost.rank: lost for lost in found}.values())


def judge(statuses: Sequence[Status], absent: Mapping[int, tuple[str, str]], limit: float) -> list[Lost] | None:
    """The ranks that hold up the others; empty where the run cannot go on, but no rank is to blame; None: wait.

    Args:
        statuses: of the ranks that answer, at least one.
        absent: host and reason of each rank that does not.
        limit: seconds without progress, the time-out of the rank that asks.
    """
    behind = min(statuses, key=lambda s: s.position)
    if absent:
        return [Lost(r, h, behind.step, behind.phase, why) for r, (h, why) in sorted(absent.items())]
    here = [s for s in statuses if s.position == behind.position]
    # Ranks that are further wait for these. Of these, ranks inside a collective wait for the rest.
    working = [s for s in here if not s.waits]
    suspects = working or (here if len(here) < len(statuses) else [])
    # Without one all wait in the same place: for the network, or for different collectives.
    if min(s.idle for s in suspects or statuses) < SLACK * limit:
        return None
    reason = "the other ranks wait for it" if working else "it waits for other ranks elsewhere"
    if len(suspects) == len(statuses):
        reason = "no progress"
    return [Lost(s.rank, s.host, s.step, s.phase, reason) for s in suspects]
