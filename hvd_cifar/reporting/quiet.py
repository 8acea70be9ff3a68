"""The start of TensorFlow and Keras, without pages of notes and without plots."""

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

    Keras is imported before the block.

    The notes come from C++ before any setting can stop them, so the file descriptor itself is turned aside. A user's
    TF_CPP_MIN_LOG_LEVEL stays, and with 0 everything is shown.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        _import_keras()
        yield
        return
    sys.stderr.flush()
    true_stderr = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            _import_keras()
            yield
        finally:
            sys.stderr.flush()
            os.dup2(true_stderr, 2)
            os.close(true_stderr)
            aside.seek(0)
            for line in aside:
                if not any(note in line for note in _NOTES):
                    os.write(2, line)


def _import_keras() -> None:
    """Keras imports matplotlib where it finds it, a quarter of a rank's start, for a gallery of images."""
    hidden = "matplotlib" not in sys.modules
    if hidden:
        sys.modules["matplotlib"] = None  # type: ignore[assignment]  # "import" then raises ImportError
    try:
        import keras  # noqa: F401
    finally:
        if hidden:
            del sys.modules["matplotlib"]
