"""The import of TensorFlow and Keras, without pages of notes and without plotting packages."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from hvd_cifar.errors import UserError
from hvd_cifar.runtime.environment import prepare_tensorflow

# TensorFlow writes these on any machine, before its log level takes effect.
_NOTES = (
    "All log messages before absl::InitializeLog()",
    "oneDNN custom operations are on",
    "This TensorFlow binary is optimized to use available CPU instructions",
    "To enable the following instructions",
    "Could not find cuda drivers on your machine",
)
# Keras and TensorFlow import these where they find them. Training never uses them, and they take a quarter of a rank's
# start.
_HIDDEN = ("matplotlib", "scipy")


@contextmanager
def quiet_start() -> Iterator[None]:
    """Filter TensorFlow's notes out of stderr in this block, which imports TensorFlow; Keras is imported before it.

    The notes come from C++ before any setting can stop them, so file descriptor 2 itself is redirected to a process
    that filters lines. That process outlives this one: it still prints the error of an import that aborts. A user's
    TF_CPP_MIN_LOG_LEVEL is kept; 0 shows everything. UserError where TensorFlow would load Keras 2.
    """
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise UserError("TF_USE_LEGACY_KERAS asks TensorFlow for Keras 2, and this program needs Keras 3: unset it")
    prepare_tensorflow(os.environ)
    shows_all = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0"
    collects = gc.isenabled()
    gc.disable()  # it takes a seventh of the imports' time, and finds nothing
    try:
        with nullcontext() if shows_all else _filtered():
            _import_keras()
            yield
    finally:
        if collects:
            gc.freeze()  # else the first collection looks at all that was imported
            gc.enable()


@contextmanager
def _filtered() -> Iterator[None]:
    sys.stderr.flush()
    true_stderr = os.dup(2)
    # In its own session, so that Ctrl-C does not end it before this process, whose last lines it prints.
    words = ["grep", "-avF", "--line-buffered", *(word for note in _NOTES for word in ("-e", note))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=true_stderr, start_new_session=True) as line_filter:
        assert line_filter.stdin
        os.dup2(line_filter.stdin.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(true_stderr, 2)
            os.close(true_stderr)  # leaving the block closes the pipe; the filter writes the rest and ends


def _import_keras() -> None:
    hidden = [name for name in _HIDDEN if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # "import" then raises ImportError
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
