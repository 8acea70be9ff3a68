"""What a side writes while it trains: its steps."""

from __future__ import annotations

import json
from pathlib import Path


class Stamps:
    """Lines of the form that this project's own runs write, each written at once; without a folder, none."""

    def __init__(self, run_dir: Path | None) -> None:
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("w") if run_dir else None

    def write(self, step: int, loss: float) -> None:
        """Record that `step` steps are done, and the loss of the last one."""
        if self._file:
            self._file.write(json.dumps({"event": "train", "step": step, "loss": loss}) + "\n")
            self._file.flush()
