"""The start of TensorFlow and Keras, without pages of notes and without plots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What TensorFlow writes on any sound machine before its own log level holds.
_NOTES = (
    "All log messages before absl::InitializeLog()",
    "oneDNN custom operations are on",
    "This TensorFlow binary is optimized to use available CPU instructions",
    "To enable the following instructions",
    "Could not find cuda drivers on your machine",
)
_FILTER = """
import sys
notes = [note.encode() for note in sys.argv[1:]]
for line in sys.stdin.buffer:
    if not any(note in line for note in notes):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
"""
# Packages that Keras or TensorFlow import where they find them, a quarter of a rank's start, and training never uses.
_HIDDEN = ("matplotlib", "scipy")


@contextmanager
def quiet_start() -> Iterator[None]:
    """Import TensorFlow in this block: its notes are dropped, all else that is written to stderr comes out.

    Keras is imported before the block.

    The notes come from C++ before any setting can stop them, so the file descriptor itself is turned aside: to a
    process that filters lines and outlives this one, so that the last words of an import that aborts come out too.
    A user's TF_CPP_MIN_LOG_LEVEL stays, and with 0 everything is shown.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        _import_keras()
        yield
        return
    sys.stderr.flush()
    true_stderr = os.dup(2)
    # In a session of its own: Ctrl-C is for this process, and the filter ends by itself after it.
    words = [sys.executable, "-I", "-S", "-c", _FILTER, *_NOTES]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=true_stderr, start_new_session=True) as line_filter:
        assert line_filter.stdin
        os.dup2(line_filter.stdin.fileno(), 2)
        try:
            _import_keras()
            yield
        finally:
            sys.stderr.flush()
            os.dup2(true_stderr, 2)
            os.close(true_stderr)  # and on leaving, the pipe: the filter writes what it has, and ends


def _import_keras() -> None:
    hidden = [name for name in _HIDDEN if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # "import" then raises ImportError
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
