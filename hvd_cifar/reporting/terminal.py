"""Lines on the terminal, and whether a person watches."""

from __future__ import annotations

import os
import sys

from hvd_cifar.files import LastingStream
from hvd_cifar.runtime.environment import launched_rank


def is_watched() -> bool:
    """Whether standard output is a terminal.

    A launcher connects its ranks to pseudo-terminals even where the user has none, so `run.sh` sets
    HVD_CIFAR_TERMINAL.
    """
    if "HVD_CIFAR_TERMINAL" in os.environ:
        return os.environ["HVD_CIFAR_TERMINAL"] == "1"
    return launched_rank() is None and sys.stdout.isatty()


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
    encoding = sys.stdout.encoding or "utf-8"  # None: Rich's stand-in for a stream, while a progress bar is shown
    lasting = LastingStream(sys.stdout)
    lasting.write(f"{line}\n".encode(encoding, "backslashreplace").decode(encoding))
    lasting.flush()
