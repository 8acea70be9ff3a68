"""One side of a comparison as a process that waits for its turn; needs Python alone.

A line of its input is "STEPS NAME"; its answer is one line of JSON: the seconds of a step, or an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

LEAD_IN = 8  # steps after the first ones: cuDNN chooses its kernels


def serve(make: Callable[[str], Callable[[int], None]], peak: Callable[[], int] = lambda: 0) -> None:
    """Answer until the input ends.

    Args:
        make: what repeats a named step a number of times, and returns when the device has finished.
        peak: the most bytes on the device so far.
    """
    sides: dict[str, Callable[[int], None]] = {}
    for line in sys.stdin:
        steps, name = line.rstrip("\n").split(" ", 1)
        answer: dict[str, Any] = {"name": name}
        try:
            if name not in sides:
                began = time.perf_counter()
                sides[name] = make(name)
                sides[name](LEAD_IN)
                answer["first_seconds"] = time.perf_counter() - began
            began = time.perf_counter()
            sides[name](int(steps))
            answer |= {"seconds": (time.perf_counter() - began) / int(steps), "peak_bytes": peak()}
        except Exception as error:  # of this form on this machine; the others go on
            answer["error"] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
            )
        print(json.dumps(answer), flush=True)


class Side:
    """A process that runs `serve`, from outside; it ends with the block."""

    def __init__(self, words: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._words, self._log, self._cwd, self._environment = words, log, cwd, environment

    def __enter__(self) -> Side:
        with self._log.open("w") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._words, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=self._cwd, env=dict(self._environment)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, name: str, steps: int, seconds: float) -> dict[str, Any]:
        """Measure a step; the answer, or {} where the process has ended or does not answer within `seconds`."""
        assert self._process.stdin and self._process.stdout
        timer = Timer(max(0.1, seconds), self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(f"{steps} {name}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith('{"name"'):
                    return dict(json.loads(line))
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        return {}
