"""A run's progress on a terminal: a bar, and the newest values, below the lines of the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Course:
    """How far a run goes."""

    global_batch_size: int
    total_steps: int
    steps_per_epoch: int


class View:
    """What the terminal shows; events of metrics.jsonl change it. `live`: the context in which it is shown."""

    def __init__(self, course: Course, step: int, console: Console) -> None:
        """Begin after a step."""
        self.course, self.step = course, step
        self.live = Live(self, console=console, auto_refresh=False)
        self._train: dict[str, Any] = {}
        self._accuracy = ""

    def add(self, event: dict[str, Any]) -> None:
        """Show the values of an event."""
        if event["event"] == "train":
            self.step, self._train = event["step"], event
        for part in ("test", "validation"):
            if f"{part}_accuracy" in event:
                self._accuracy = f"{part} accuracy {event[f'{part}_accuracy']:.2%}"
        self.live.refresh()

    def say(self, line: str) -> None:
        """Print a line above the view."""
        self.live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        course, left, values = self.course, "", [self._accuracy] if self._accuracy else []
        if train := self._train:
            rate = train["images_per_second"]
            if rate > 0:
                left = f"{clock((course.total_steps - self.step) * course.global_batch_size / rate)} left"
            values = [f"loss {train['loss']:.4f}", *values]
            values += [f"{rate:,.0f} images/s", f"learning rate {train['learning_rate']:.4g}"]
        line = Table.grid(padding=(0, 2), expand=True)
        for ratio, least in ((None, None), (1, 8), (None, None), (None, None)):
            line.add_column(no_wrap=True, ratio=ratio, min_width=least)
        epoch = f"epoch {self.step / course.steps_per_epoch:.2f} of {course.total_steps / course.steps_per_epoch:.4g}"
        step = f"step {self.step:,} of {course.total_steps:,}"
        line.add_row(epoch, ProgressBar(course.total_steps, self.step), step, left)
        yield line
        if values:
            yield Text("   ".join(values), no_wrap=True, overflow="ellipsis")


def clock(seconds: float) -> str:
    """A time as 1:02:03."""
    minutes, second = divmod(round(min(seconds, 1e12)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
