"""The errors that end a run early, and their exit code where a run can go on. Standard library only."""

import re
import sys
from pathlib import Path

RESUME = 75  # exit code of a run that was asked to stop, EX_TEMPFAIL of sysexits.h: the same command goes on
STALLED = 69  # exit code of a run that a rank held up, EX_UNAVAILABLE of sysexits.h: the others wait for it in vain
DIVERGED = "model diverged"  # in the line of a run whose loss is not finite: to repeat it gives the same
OUT_OF_SYNC = "ranks are out of sync"  # in the line of a run whose ranks have different weights, as their copies have


class UserError(Exception):
    """An error that the user can correct.

    The message is one line that says what is wrong, where, and what to do. The command line prints it once,
    without a traceback, and ends with exit code 2. Any other exception is an error of the program and keeps
    its traceback.
    """


class Preempted(SystemExit):
    """A run that was asked to stop and has written a checkpoint, on every rank; ends a program with exit code 75."""

    def __init__(self) -> None:
        super().__init__(RESUME)


class TrainingError(Exception):
    """A run that cannot go on correctly: the loss is not finite, ranks disagree, a rank is lost.

    The message is one line. The command line prints it once, without a traceback, and ends with exit code 1.
    """


class Diverged(TrainingError):
    """A run whose loss or weights are not finite; under --on-nan rollback it goes back.

    Attributes:
        weights_step: of the weights that the loss belongs to; None: not known.
    """

    def __init__(self, message: str, weights_step: int | None = None) -> None:
        super().__init__(message)
        self.weights_step = weights_step


def reason_of(failure: BaseException) -> str:
    """Why a library or the system failed, in a line: without the operation and the path that TensorFlow puts first."""
    text = getattr(failure, "strerror", None) or getattr(failure, "message", None) or str(failure)
    text = re.sub(r"^\{\{.*?\}\}|\[Op:\w+\]", "", text.strip()).strip()
    lines = re.sub(r"^/\S*; ", "", text).splitlines()
    return lines[0][:300] if lines else type(failure).__name__


def printable(text: str) -> str:
    """A text of others on one line, without what a terminal would act on."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cause_of(failure: BaseException) -> str:
    """An error of a user's own code in one line: its type, its text, and the line of the user's file it comes from."""
    place, trace = "", failure.__traceback__
    not_the_users = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(not_the_users):
            place = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}{place}"
