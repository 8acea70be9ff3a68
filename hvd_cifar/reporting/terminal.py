"""Lines on standard output."""

from __future__ import annotations

import os
import sys


def open_streams() -> None:
    """Open /dev/null as each standard stream that this process was started without (`>&-`)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def say(line: str) -> None:
    """Print a line to standard output in one piece, so that lines of several ranks do not mix."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(f"{line}\n".encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError:  # output without a reader (`| head`, a closed terminal) or room: the run's files hold the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
