"""What a side writes while it trains: its steps, and under an elastic launcher the examples of each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Stamps:
    """Lines of the form that this project's own runs write, each written at once; without a folder, none.

    With `goes_on` they follow those of an earlier start: a step that is made again has a second line.
    """

    def __init__(self, run_dir: Path | None, goes_on: bool = False) -> None:
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a" if goes_on else "w") if run_dir else None

    def write(self, step: int, loss: float) -> None:
        """Record that `step` steps are done, and the loss of the last one."""
        if self._file:
            self._file.write(json.dumps({"event": "train", "step": step, "loss": loss}) + "\n")
            self._file.flush()


class Ledger:
    """The examples that a process uses, step by step, in a file of its own; `used` reads the files of all processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a")

    def go_on_from(self, step: int) -> None:
        """Earlier records of later steps no longer count. All ranks call this before any of them uses an example."""
        self._write({"from": step})

    def use(self, step: int, examples: Iterable[int]) -> None:
        """Called before the step: a rank may be lost in it."""
        self._write({"step": step, "examples": [int(example) for example in examples]})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps({"time": time.monotonic(), **line}) + "\n")  # one clock for all processes
        self._file.flush()


def used(folder: Path) -> dict[int, list[int]]:
    """The examples of each step that counts, which excludes steps that were undone by a restart from an earlier one."""
    lines: list[dict[str, Any]] = []
    for path in folder.glob("*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]  # a killed process may leave half a line
        lines += [json.loads(line) for line in whole.splitlines()]
    found: dict[int, list[int]] = {}
    for line in sorted(lines, key=lambda line: float(line["time"])):
        if "from" in line:
            found = {step: examples for step, examples in found.items() if step <= line["from"]}
        else:
            found.setdefault(line["step"], []).extend(line["examples"])
    return found
