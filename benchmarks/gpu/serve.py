"""Forms of a step in a process that waits for its turn; needs Python alone.

A line of its input is "STEPS NAME"; its answer is one line of JSON: the seconds of a step, or an error. Processes may
build their forms at the same time. The first steps, in which cuDNN and XLA measure kernels, run while no other process
has the lock, a file that the variable LOCK names.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any

LEAD_IN = 8  # steps after the first ones: cuDNN chooses its kernels
LOCK = "HVD_CIFAR_DEVICE_LOCK"
SILENCE = "no answer"


Repeat = Callable[[int], None]  # makes a number of steps; returns when the device has finished


def serve(
    make: Callable[[str], Repeat], reset: Callable[[], int] = lambda: 0, peak: Callable[[], int] = lambda: 0
) -> None:
    """Answer until the input ends.

    Args:
        make: what repeats a named form. What takes long and needs no quiet device is done when it returns.
        reset: begins to count the device's memory; the bytes in use.
        peak: the most bytes in use since then.
    """
    forms: dict[str, Repeat] = {}
    for line in sys.stdin:
        steps, name = line.rstrip("\n").split(" ", 1)
        answer: dict[str, Any] = {"name": name}
        try:
            if name not in forms:
                before, began = reset(), time.perf_counter()
                forms[name] = make(name)
                with ExitStack() as stack:
                    if path := os.environ.get(LOCK):
                        fcntl.flock(stack.enter_context(Path(path).open("w")), fcntl.LOCK_EX)
                    forms[name](LEAD_IN)
                answer |= {"first_seconds": time.perf_counter() - began, "bytes": peak() - before}
            began = time.perf_counter()
            forms[name](int(steps))
            answer["seconds"] = (time.perf_counter() - began) / int(steps)
        except Exception as error:  # of this form on this machine; the others go on
            first = str(error).strip().partition("\n")[0][:200]
            answer["error"] = f"{type(error).__name__}: {first}"
        print(json.dumps(answer), flush=True)


class Side:
    """A process that runs `serve`, from outside; it ends with the block. The first question starts it."""

    def __init__(self, words: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._words, self._log, self._cwd, self._environment = words, log, cwd, environment
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = False

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True
        if self._process:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        place: dict[str, Any] = {"cwd": self._cwd, "env": dict(self._environment), "text": True}
        with self._log.open("a") as log:
            return subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, **place)

    def ask(self, name: str, steps: int, seconds: float) -> dict[str, Any]:
        """Measure a step. After a time-out, or where the process has ended, the next question starts it anew.

        Returns:
            `seconds` of a step or an `error`; the first time also `first_seconds` and `bytes`.
        """
        if self._has_ended:  # another thread asks
            return {"error": SILENCE}
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin and process.stdout
        timer = Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{steps} {name}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith('{"name"'):
                    return dict(json.loads(line))
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        process.wait()
        return {"error": f"{SILENCE} within {seconds:.0f} s, or {self._log.name} says why"}
