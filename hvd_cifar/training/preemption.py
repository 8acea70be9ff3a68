"""Requests to stop a run: signals of a scheduler, a spot instance or a user, noticed at once by a thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvd_cifar.errors import RESUME
from hvd_cifar.reporting import terminal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SECONDS_FOR_ROOT = 2.0  # other ranks wait this much longer, so that rank 0 speaks for all


class StopRequests:
    """In its block a signal asks the run to stop; `made` says whether one has come.

    Python runs the handler of a signal in the main thread, which a collective or a save may hold for long. So a thread
    learns of signals. Where the run still goes on after the grace period, or at a second SIGINT, it ends the process.
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
            return self  # Python sets handlers in the main thread only: a run beside it is never asked
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._watch, args=[reader], daemon=True)
        thread.start()
        self._undo.callback(os.close, reader)
        self._undo.callback(thread.join)
        self._undo.callback(os.close, writer)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        # Without a handler of Python's a signal is not written to the pipe.
        for number, before in _handle(lambda *_: None).items():
            signal.siginterrupt(number, False)  # a write to a file or a network goes on
            self._undo.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def _watch(self, reader: int) -> None:
        asked, end, interrupts = "", float("inf"), 0
        while True:
            left = None if end == float("inf") else max(0.0, end - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                terminal.complain(
                    f"hvd_cifar: no checkpoint within {self._grace_seconds:g} s of {asked}; the run ends; "
                    f"{self._kept()} (exit code {RESUME})"
                )
                os._exit(RESUME)
            numbers = os.read(reader, 64)
            if not numbers:  # the block has ended
                return
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                os._exit(128 + signal.SIGINT)
            found = [number for number in numbers if number in SIGNALS]
            if found and not self.made:
                self.made, asked = True, signal.Signals(found[0]).name
                end = time.monotonic() + self._grace_seconds + (0.0 if self._is_root else SECONDS_FOR_ROOT)


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """For a process that only trains: outside of `StopRequests` a signal ends it with exit code `RESUME`.

    Before the first step and after the last one nothing is lost. After the block, while Python ends, signals are
    ignored: Python would take its handlers back, and a repeated signal would change the exit code.
    """
    _handle(lambda *_: os._exit(RESUME))
    try:
        yield
    finally:
        _handle(signal.SIG_IGN)


def _handle(handler: Any) -> dict[int, Any]:
    """Set a handler for all signals but an ignored SIGHUP (nohup); the handlers before."""
    chosen = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in chosen}
