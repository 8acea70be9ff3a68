"""What a run tells: lines and a progress bar on the terminal, metrics.jsonl, TensorBoard, summary.json."""

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
    """The voice of a run. Every rank has one; only rank 0's (with a folder) speaks and writes."""

    def __init__(self, run_dir: Path | None, watched: bool, dataset: str) -> None:
        self.run_dir = run_dir
        self.dataset = dataset  # named in every output, so that no figure passes for one on other data
        self._console = Console(force_terminal=True) if run_dir and watched else None
        self._progress: Progress | None = None
        self._bar: Any = None
        self._metrics: Any = None
        self._examples: Any = None
        self.last_train: dict[str, Any] = {}  # the newest event of each kind, also from before a resume
        self.last_eval: dict[str, Any] = {}
        self._board: Any = None

    def open(self, first_step: int, record_examples: bool = False) -> None:
        """Begin to write metrics from a step on; events of later steps, from a run that was cut off, are dropped."""
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
        """Finish what is being written."""
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
        """Show a bar over the steps while the block runs, if a person watches."""
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
        """Report a window of steps; `loss` is the last step's global mean, `seconds` are those of one step."""
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
            return  # it was made before this run was cut off, and is on record
        self._remember({"event": event, **values})
        with _writing(self.run_dir / "metrics.jsonl"):
            self._metrics.write(json.dumps({"event": event, "dataset": self.dataset, **values}) + "\n")
            self._metrics.flush()
        scalars = {f"{self.dataset}/{event}/{name}": v for name, v in values.items() if name not in ("step", "epoch")}
        with _writing(self.run_dir / "tensorboard"):
            self._board.write(values["step"], scalars)

    def warn(self, line: str) -> None:
        """Print a line to standard error, whatever else is on the screen."""
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
        """Remove the summary of an earlier end: the run goes on."""
        if self.run_dir is not None:
            with _writing(self.run_dir):
                (self.run_dir / "summary.json").unlink(missing_ok=True)

    def summary_step(self) -> int | None:
        """The step that summary.json is of; None: there is none."""
        if self.run_dir is None:
            return None
        try:
            return int(json.loads((self.run_dir / "summary.json").read_text())["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        if self.run_dir is None:
            return
        path = self.run_dir / "summary.json"
        with _writing(path):
            replace_text(path, json.dumps(values, indent=2) + "\n")


def _keep_events_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines of later steps; the events that stay."""
    if not path.exists():
        return []
    kept, events = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break  # the line that a killed run was writing
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
