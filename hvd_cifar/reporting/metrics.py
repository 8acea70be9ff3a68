"""The output of a run: lines and a progress bar on the terminal, metrics.jsonl, TensorBoard, summary.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_text
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.board import Board

EXAMPLES = "examples.jsonl"


class Reporter:
    """Prints and writes the output of a run. Every rank has one; only rank 0's, which has a folder, does anything."""

    def __init__(self, run_dir: Path | None, watched: bool, dataset: str) -> None:
        self.run_dir = run_dir
        self.dataset = dataset  # every output names it: a result on one data set must not be taken for another's
        self._console = Console(force_terminal=True) if run_dir and watched else None
        self._progress: Progress | None = None
        self._bar: Any = None
        self._metrics: Any = None
        self._examples: Any = None
        self.last_train: dict[str, Any] = {}  # the newest event of its kind, also from before a resume
        self.last_eval: dict[str, Any] = {}
        self._board: Any = None

    def open(self, first_step: int, record_examples: bool = False) -> None:
        """Open the files, and remove entries after `first_step`, which an interrupted run left."""
        if self.run_dir is None:
            return
        path = self.run_dir / "metrics.jsonl"
        with _writing(path):
            for event in _keep_events_up_to(path, first_step):
                self._remember(event)
            self._metrics = path.open("a", encoding="utf-8")
        with _writing(self.run_dir / "tensorboard"):
            self._board = Board(self.run_dir / "tensorboard", first_step)
        if record_examples:
            path = self.run_dir / EXAMPLES
            with _writing(path):
                _keep_events_up_to(path, first_step)
                self._examples = path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the files."""
        if self.run_dir is None:
            return
        with _writing(self.run_dir):
            for file in (self._metrics, self._examples):
                if file:
                    file.close()
            if self._board:
                self._board.close()

    @contextmanager
    def progress(self, first_step: int, total_steps: int) -> Iterator[None]:
        """Show a progress bar of the steps in the block, where a person watches."""
        if self._console is None:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, refresh_per_second=4) as self._progress:
            self._bar = self._progress.add_task("step", total=total_steps, completed=first_step, note="")
            yield
        self._progress = None

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.run_dir is None:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            terminal.say(line)

    def train(
        self, step: int, epoch: float, loss: float, learning_rate: float, images_per_second: float, seconds: float
    ) -> None:
        """Report the steps since the last report: `loss` of the last one, over its global batch; `seconds` of each."""
        if self.run_dir is None:
            return
        rate, per_batch = f"{images_per_second:.1f} images/s", f"{seconds:.3f} s/batch"
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, note=f"loss {loss:.4f}  {rate}")
        stamp = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self.say(f"{stamp}: step {step}, loss = {loss:.4f} ({rate}; {per_batch})")
        event = {"step": step, "epoch": epoch, "loss": loss, "learning_rate": learning_rate}
        self._write("train", {**event, "images_per_second": images_per_second})

    def evaluation(self, step: int, epoch: float, accuracy: float, loss: float, examples: int) -> None:
        """Report an evaluation on the test set."""
        if self.run_dir is None:
            return
        found = f"{self.dataset} test accuracy {accuracy:.2%}, test loss {loss:.4f}, {examples} examples"
        self.say(f"step {step} (epoch {epoch:.2f}): {found}")
        values = {"step": step, "epoch": epoch, "test_accuracy": accuracy, "test_loss": loss, "test_examples": examples}
        self._write("eval", values)

    def _remember(self, event: dict[str, Any]) -> None:
        if event["event"] == "train":
            self.last_train = event
        else:
            self.last_eval = event

    def _write(self, event: str, values: dict[str, Any]) -> None:
        assert self.run_dir is not None
        if event == "eval" and self.last_eval.get("step") == values["step"]:
            return  # a run that was cut off after this evaluation has recorded it
        self._remember({"event": event, **values})
        with _writing(self.run_dir / "metrics.jsonl"):
            self._metrics.write(json.dumps({"event": event, "dataset": self.dataset, **values}) + "\n")
            self._metrics.flush()
        scalars = {f"{self.dataset}/{event}/{name}": v for name, v in values.items() if name not in ("step", "epoch")}
        with _writing(self.run_dir / "tensorboard"):
            self._board.write(values["step"], scalars)

    def warn(self, line: str) -> None:
        """Print a line to standard error."""
        if self.run_dir is not None:
            terminal.complain("hvd_cifar: " + line)

    def examples(self, step: int, by_rank: list[list[int]]) -> None:
        """Record the examples that each rank used in a step, as indices into the training set."""
        if self.run_dir is None:
            return
        with _writing(self.run_dir / EXAMPLES):
            self._examples.write(json.dumps({"step": step, "ranks": by_rank}) + "\n")
            self._examples.flush()

    def withdraw_summary(self) -> None:
        """Remove the summary that the run wrote at an earlier end."""
        if self.run_dir is not None:
            with _writing(self.run_dir):
                (self.run_dir / "summary.json").unlink(missing_ok=True)

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        if self.run_dir is None:
            return
        path = self.run_dir / "summary.json"
        with _writing(path):
            replace_text(path, json.dumps(values, indent=2) + "\n")


def _keep_events_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of later steps from a file; the events that stay."""
    if not path.exists():
        return []
    kept, events = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break  # a killed run was writing this line
        if event["step"] <= step:
            kept.append(line + "\n")
            events.append(event)
    replace_text(path, "".join(kept))
    return events


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, tf.errors.OpError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
        raise UserError(f"cannot write {path}: {reason}; make room or give another --run-dir") from None
