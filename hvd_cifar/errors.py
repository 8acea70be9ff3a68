"""The errors that end a run early, and the exit codes that tell a launcher what to do. Standard library only."""

import re
import sys
from pathlib import Path

from hvd_cifar.distributed.errors import TrainingError as TrainingError  # re-exported

# Exit codes as in sysexits.h.
RESUME = 75  # EX_TEMPFAIL: the run stopped because it was asked to; the same command resumes it
STALLED = 69  # EX_UNAVAILABLE: a rank hangs, and the others wait for it in vain
# Parts of error messages, by which the launcher knows that another start would fail in the same way.
DIVERGED = "model diverged"  # the loss is not finite
MOST_SHOWN = 80  # characters of a wrong value in an error message
OUT_OF_SYNC = "ranks are out of sync"  # an elastic job's copies of the state differ like the ranks


class UserError(Exception):
    """An error that the user can correct.

    The message is one line that says what is wrong, where, and what to do. The command line prints it once,
    without a traceback, and ends with exit code 2. Any other exception is an error of the program and keeps
    its traceback.
    """

    of_one_rank = False  # whether other ranks may not have it: the command line then prints it on this rank
    crosses_ranks = True  # as of `TrainingError`


class Preempted(SystemExit):
    """The run was asked to stop, and has written a checkpoint. Raised on every rank; ends the program with code 75."""

    def __init__(self) -> None:
        super().__init__(RESUME)


def reason_of(failure: BaseException) -> str:
    """Why a library or the system failed, in one line. Removes the operation and path that TensorFlow puts first."""
    text = getattr(failure, "strerror", None) or getattr(failure, "message", None) or str(failure)
    text = re.sub(r"^\{\{.*?\}\}|\[Op:\w+\]", "", text.strip()).strip()
    lines = re.sub(r"^/\S*; ", "", text).splitlines()
    return lines[0][:300] if lines else type(failure).__name__


def printable(text: str) -> str:
    """Untrusted text on one line, with control characters escaped so that a terminal does not act on them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A wrong value as an error message shows it: on one line, at most `MOST_SHOWN` characters."""
    text = printable(str(value))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def cause_of(failure: BaseException) -> str:
    """An error of the user's own code in one line: its type, its text, and the line of the user's file."""
    place, trace = "", failure.__traceback__
    not_the_users = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(not_the_users):
            place = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    text = str(failure)
    if shown := re.search("\x1b\\[1m(.*?)\x1b\\[0m", text, re.DOTALL):  # Keras writes the cause in bold, amid much else
        text = shown[1]
    return f"{type(failure).__name__}: {' '.join(text.split())[:300]}{place}"
