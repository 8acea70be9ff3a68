"""Lines on the terminal, and whether a person watches."""

from __future__ import annotations

import os
import sys

from hvd_cifar.runtime.environment import launched_rank


def is_watched() -> bool:
    """Whether standard output is a terminal.

    A launcher connects its ranks to pseudo-terminals even where the user has none, so `run.sh` sets
    HVD_CIFAR_TERMINAL.
    """
    if "HVD_CIFAR_TERMINAL" in os.environ:
        return os.environ["HVD_CIFAR_TERMINAL"] == "1"
    return launched_rank() is None and sys.stdout.isatty()


def say(line: str) -> None:
    """Print a line to standard output in one piece, so that lines of several ranks do not mix."""
    _write(sys.stdout, line)


def complain(line: str) -> None:
    """Print a line to standard error in one piece."""
    _write(sys.stderr, line)


def _write(stream: object, line: str) -> None:
    stream.write(line + "\n")  # type: ignore[attr-defined]
    stream.flush()  # type: ignore[attr-defined]
