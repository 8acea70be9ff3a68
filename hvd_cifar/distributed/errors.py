"""What is known of a rank that fails or hangs: its error, and the trail of its phases. Standard library only."""

from __future__ import annotations

import time
from collections import deque

_RING: deque[tuple[float, str]] = deque(maxlen=100)  # when (monotonic, s), and which phase or collective began


class TrainingError(Exception):
    """The run cannot continue correctly: the loss is not finite, ranks are out of sync, or a rank is lost.

    The message is one line. The command line prints it once, without a traceback, and ends with `code`.

    Attributes:
        of_one_rank: whether other ranks may not have it: the command line then prints it on this rank.
        code: the exit code.
        crosses_ranks: set in a class whose errors every rank raises where one rank does (`collectives.on_every_rank`).
    """

    of_one_rank = False
    crosses_ranks = True
    code = 1


def note(what: str) -> None:
    """Remember that a phase or a collective begins."""
    _RING.append((time.monotonic(), what))


def recent() -> list[str]:
    """The last phases and collectives of this process, oldest first, with the seconds since each began."""
    now = time.monotonic()
    return [f"{now - when:8.3f} s ago: {what}" for when, what in list(_RING)]
