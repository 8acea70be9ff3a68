"""TensorFlow's start without its pages of notes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# What TensorFlow writes on any sound machine before its own log level holds.
_NOTES = (
    b"All log messages before absl::InitializeLog()",
    b"oneDNN custom operations are on",
    b"This TensorFlow binary is optimized to use available CPU instructions",
    b"To enable the following instructions",
    b"Could not find cuda drivers on your machine",
)


@contextmanager
def quiet_start() -> Iterator[None]:
    """Import TensorFlow in this block: its notes are dropped, all else that is written to stderr comes out after it.

    The notes come from C++ before any setting can stop them, so the file descriptor itself is turned aside. A user's
    TF_CPP_MIN_LOG_LEVEL stays, and with 0 everything is shown.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        yield
        return
    sys.stderr.flush()
    true_stderr = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(true_stderr, 2)
            os.close(true_stderr)
            aside.seek(0)
            for line in aside:
                if not any(note in line for note in _NOTES):
                    os.write(2, line)
