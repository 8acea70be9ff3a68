"""Requests to stop a run: signals from a scheduler, a spot instance or a user, which a thread notices at once."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvd_cifar.errors import RESUME
from hvd_cifar.files import complain

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SECONDS_FOR_ROOT = 2.0  # other ranks wait this much longer, so that rank 0 prints the reason first


class StopRequests:
    """A context in which signals ask the run to stop; `made` says whether one has come.

    Python runs signal handlers in the main thread, which a collective or a save may block for long. A second thread
    therefore reads the signals. It ends the process after the grace period, and at a second SIGINT.
    """

    def __init__(self, grace_seconds: float, is_root: bool, kept: Callable[[], str]) -> None:
        """`kept`: says which checkpoint the run can go on from."""
        self.made = False
        self._grace_seconds = grace_seconds
        self._is_root = is_root
        self._kept = kept
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python allows handlers in the main thread only: a run in another thread gets no requests
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._watch, args=[reader], daemon=True)
        thread.start()
        self._undo.callback(os.close, reader)
        self._undo.callback(thread.join)
        self._undo.callback(os.close, writer)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        # Python writes only signals with a Python handler to the pipe.
        for number, before in _handle(lambda *_: None).items():
            signal.siginterrupt(number, False)  # an interrupted system call restarts
            self._undo.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def _watch(self, reader: int) -> None:
        asked, end, interrupts = "", math.inf, 0
        arrivals = select.poll()  # `select` takes no descriptor above 1023
        arrivals.register(reader, select.POLLIN)
        while True:
            left = max(0.0, end - time.monotonic())
            if not arrivals.poll(None if end == math.inf else left * 1000):
                complain(
                    f"no checkpoint within {self._grace_seconds:g} s of {asked}; the run ends; "
                    f"{self._kept()} (exit code {RESUME})"
                )
                os._exit(RESUME)
            numbers = os.read(reader, 64)
            if not numbers:  # the block has ended
                return
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                os._exit(128 + signal.SIGINT)
            if not self.made and (found := [number for number in numbers if number in SIGNALS]):
                self.made, asked = True, signal.Signals(found[0]).name
                end = time.monotonic() + self._grace_seconds + (0.0 if self._is_root else SECONDS_FOR_ROOT)


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """For a process that only trains: outside of `StopRequests` a signal ends it with exit code `RESUME`.

    Before the first step and after the last one there is nothing to lose. After the block signals are ignored: Python
    removes its handlers while it shuts down, and a repeated signal would change the exit code.
    """
    _handle(lambda *_: os._exit(RESUME))
    try:
        yield
    finally:
        _handle(signal.SIG_IGN)


def _handle(handler: Any) -> dict[int, Any]:
    """Set a handler for all signals, except a SIGHUP that nohup ignores. Return the previous handlers."""
    chosen = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in chosen}
