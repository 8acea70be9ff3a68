"""What a side writes while it trains: a line of metrics.jsonl each time it knows that a step is done."""

from __future__ import annotations

import json
from pathlib import Path


class Stamps:
    """Lines of the form that this project's own runs write, each written at once; None as a folder: none."""

    def __init__(self, run_dir: Path | None) -> None:
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("w") if run_dir else None

    def write(self, step: int, loss: float) -> None:
        """This number of steps is done, and this was the last one's loss."""
        if self._file:
            self._file.write(json.dumps({"event": "train", "step": step, "loss": loss}) + "\n")
            self._file.flush()
