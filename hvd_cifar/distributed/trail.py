"""The last phases and collectives of this process, for whoever looks for a rank that hangs. Standard library only."""

from __future__ import annotations

import time
from collections import deque

_RING: deque[tuple[float, str]] = deque(maxlen=100)  # when (monotonic, s), and which phase or collective began


def note(what: str) -> None:
    """Remember that a phase or a collective begins."""
    _RING.append((time.monotonic(), what))


def recent() -> list[str]:
    """The last phases and collectives of this process, oldest first, with the seconds since each began."""
    now = time.monotonic()
    return [f"{now - when:8.3f} s ago: {what}" for when, what in list(_RING)]
