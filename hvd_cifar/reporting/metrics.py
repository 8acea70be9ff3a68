"""The output of a run: lines on the terminal, metrics.jsonl, sessions.jsonl, TensorBoard, summary.json."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import append, complain, parse_json, replace_lines, replace_text
from hvd_cifar.reporting import board, sessions, terminal
from hvd_cifar.reporting.sessions import SESSIONS

SECONDS_BETWEEN_BEATS = 1.0
METRICS = "metrics.jsonl"


class Reporter:
    """Prints and writes the output of a run. Every rank has one; only rank 0's has a folder, and writes."""

    def __init__(self, run_dir: Path | None, dataset: str, total_steps: int, quiet: bool = False) -> None:
        """`total_steps`: of the run. `quiet`: print only warnings."""
        self.run_dir = run_dir
        self.dataset = dataset  # every output names it: a result on one data set must not be taken for another's
        self._total_steps, self._quiet = total_steps, quiet
        self._unwritten: dict[Path, bytes] = {}  # by file: what could not be written yet
        self._beaten = 0.0
        self._last_step = 0  # of earlier sessions, also of entries that `open` removes
        self.marks: list[sessions.Mark] = []  # of this session and earlier ones
        self.last_train: dict[str, Any] = {}  # the newest event of its kind, also from before a resume
        self.evaluated: dict[str, set[int]] = defaultdict(set)  # steps, by part of the data set
        self.missed: set[int] = set()  # steps whose checkpoint nobody has evaluated
        self._events: Path | None = None  # of TensorBoard

    def open(self, first_step: int) -> None:
        """Open the files, and remove entries after `first_step`, which an interrupted run left."""
        if self.run_dir is None:
            return
        self.resume_file(METRICS, first_step, self._remember)
        folder = self.run_dir / "tensorboard"
        with _writing(folder):
            self._events = board.begin(folder, first_step)

    def resume_file(
        self, name: str, first_step: int, see: Callable[[dict[str, Any]], None] = lambda event: None
    ) -> None:
        """Remove the entries after `first_step` of a file of JSON lines in the run directory, which is made if absent.

        `see` is called with each entry that stays. UserError where the file cannot be written.
        """
        if self.run_dir is None:
            return
        path, damaged = self.run_dir / name, 0

        def kept(lines: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal damaged
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # the last line of a killed run
                try:
                    event = parse_json(line.decode())
                    is_kept = event["step"] <= first_step
                    self._last_step = max(self._last_step, event["step"])
                except (ValueError, LookupError, TypeError):
                    damaged += 1
                    continue
                if is_kept:
                    see(event)
                    yield line

        # Line by line: the examples of a long run would take much memory. A missing file is not made before: a reader
        # could open it, and would never see the one that takes its place.
        with _writing(path), path.open("rb") if path.exists() else io.BytesIO() as lines:
            replace_lines(path, kept(lines))
        if damaged:
            self.warn(f"warning: {path}: {damaged} damaged line{'s' * (damaged > 1)} removed")

    def record(self, event: str, **values: Any) -> None:
        """Add an event to metrics.jsonl. `values`: its step, and what else it has, as JSON."""
        if self.run_dir is not None:
            self._remember({"event": event, **values})
            self.append_line(METRICS, {"event": event, **values})

    def begin_session(self, **launch: Any) -> None:
        """Begin to mark what happens and where the time goes. `launch`: values of that mark (`sessions`)."""
        if self.run_dir is None:
            return
        path = self.run_dir / SESSIONS
        with _writing(path):
            seen = path.stat().st_mtime if path.exists() else 0.0
            path.touch()
            text = path.read_text(encoding="utf-8", errors="replace")
            append(path, b"\n" if text and not text.endswith("\n") else b"")  # a killed run may leave half a line
        self.marks = sessions.read(text)
        if not sessions.has_ended(self.marks):
            self.mark("lost", time=seen, step=self._last_step)
        self.mark("launch", **launch)

    def mark(self, kind: str, **values: Any) -> None:
        """Mark what the session begins or ends; `sessions` lists the kinds and their values."""
        if self.run_dir is not None:
            self.marks.append({"mark": kind, "time": time.time(), **values})
            self.append_line(SESSIONS, self.marks[-1])

    def beat(self) -> None:
        """Show that the session lives: the modification time of sessions.jsonl dates the end of a killed session."""
        if self.run_dir is not None and time.monotonic() > self._beaten + SECONDS_BETWEEN_BEATS:
            self._beaten = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.run_dir / SESSIONS, (time.time(),) * 2)  # by this host's clock, not the file server's

    @property
    def is_behind(self) -> bool:
        """Whether something could not be written; the run then saves its state before it ends."""
        return bool(self._unwritten)

    def catch_up(self) -> None:
        """Write what could not be written before. UserError where it still cannot."""
        for path in list(self._unwritten):
            with _writing(path):
                self._write(path, has_waited=True)

    def say(self, line: str) -> None:
        """Print a line."""
        if self.run_dir is not None and not self._quiet:
            terminal.say(line)

    def train(
        self, step: int, epoch: float, loss: float, learning_rate: float, images_per_second: float, seconds: float
    ) -> None:
        """Report the steps since the last report: `loss` of the last one, over its global batch; `seconds` of each."""
        if self.run_dir is None:
            return
        stamp, rate = datetime.now().astimezone(), f"{images_per_second:.1f} images/s; {seconds:.3f} s/batch"
        left = timedelta(seconds=round((self._total_steps - step) * seconds))  # without evaluations
        line = f"step {step}, loss = {loss:.4f} ({rate}; epoch {epoch:.2f}, {left} left)"
        self.say(f"{stamp.isoformat(sep=' ', timespec='seconds')}: {line}")
        shown = {"learning_rate": learning_rate, "images_per_second": images_per_second}
        self.record("train", dataset=self.dataset, step=step, epoch=epoch, loss=loss, **shown)
        self.show(step, shown)

    def evaluation(
        self, step: int, epoch: float, found: Mapping[str, float], part: str = "test", at_step: int | None = None
    ) -> None:
        """Report an evaluation on a part of the data set ("test" or "validation"): accuracy, loss, examples.

        `at_step`: of training, at which the result arrived, where other ranks evaluate beside it.
        """
        if self.run_dir is None:
            return
        results = f"{part} accuracy {found['accuracy']:.2%}, {part} loss {found['loss']:.4f}"
        came = "" if at_step is None else f"; it came at step {at_step}"
        self.say(f"step {step} (epoch {epoch:.2f}): {self.dataset} {results}, {found['examples']} examples{came}")
        if step in self.evaluated[part]:
            return  # the run recorded this evaluation before it was interrupted
        values = {f"{part}_{name}": value for name, value in found.items()}
        values |= {} if at_step is None else {"at_step": at_step}
        self.record("eval" if part == "test" else part, dataset=self.dataset, step=step, epoch=epoch, **values)
        tags = {f"{self.dataset}/{part}_{name}": found[name] for name in ("accuracy", "loss")}
        self.show(step, tags)

    def missing(self, step: int, why: str) -> None:
        """Report a checkpoint that nobody has evaluated."""
        self.warn(f"step {step} is not evaluated: {why}")
        self.record("missing", step=step, reason=why)

    def ranks(self, step: int, **by_rank: Sequence[Any]) -> None:
        """Record values of the steps since the last record, by rank: seconds a step, bytes/s by address."""
        self.record("ranks", dataset=self.dataset, step=step, **by_rank)
        every = ((f"{name}/rank_{i}", value) for name, values in by_rank.items() for i, value in enumerate(values))
        self.show(step, {tag: value for tag, value in every if isinstance(value, float)})

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers by tag to TensorBoard's file."""
        if self._events:
            self._append(self._events, board.encode(step, values))

    def _remember(self, event: dict[str, Any]) -> None:
        match event:
            case {"event": "train"}:
                self.last_train = event
            case {"event": "missing", "step": step}:
                self.missed.add(step)
            case {"event": "eval" | "validation" as kind, "step": step}:
                self.evaluated["test" if kind == "eval" else kind].add(step)

    def append_line(self, name: str, values: dict[str, Any]) -> None:
        """Add a line to a file of the run."""
        if self.run_dir is not None:
            self._append(self.run_dir / name, json.dumps(values).encode() + b"\n")

    def _append(self, path: Path, content: bytes) -> None:
        """Add to a file; where it cannot be written it waits for `catch_up`."""
        has_waited = path in self._unwritten
        self._unwritten[path] = self._unwritten.get(path, b"") + content
        with contextlib.suppress(OSError):
            self._write(path, has_waited)

    def _write(self, path: Path, has_waited: bool) -> None:
        append(path, self._unwritten[path])
        del self._unwritten[path]
        if has_waited:
            self.warn(f"note: {path} could not be written for a while; nothing of it is lost")

    def warn(self, line: str, step: int | None = None) -> None:
        """Print a line to standard error; with `step`, the last finished one, also record it."""
        if self.run_dir is not None:
            complain(line)
            if step is not None:
                self.mark("warning", step=step, text=line)

    def withdraw_summary(self) -> None:
        """Remove the summary that the run wrote at an earlier end."""
        if self.run_dir is not None:
            with _writing(self.run_dir):
                (self.run_dir / "summary.json").unlink(missing_ok=True)

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json, whole or not at all, after all else."""
        if self.run_dir is None:
            return
        self.catch_up()
        path = self.run_dir / "summary.json"
        with _writing(path):
            replace_text(path, json.dumps(values, indent=2) + "\n")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise UserError(f"cannot write {path}: {reason_of(failure)}; make room or give another --run-dir") from None
