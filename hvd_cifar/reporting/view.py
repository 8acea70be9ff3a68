"""A run's progress on a terminal: a bar with the newest values, and a line for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.errors import printable
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.run_files import Evaluated, Event, Ranks, Train, Validated

ROWS_FOR_LINES = 8  # of the terminal, for the log and the bar: ranks are shown only where their rows fit below


@dataclass(frozen=True)
class Course:
    """How far a run goes; None: not known."""

    global_batch_size: int
    total_steps: int | None
    steps_per_epoch: int | None
    sizes: ImageSizes | None = None


class View:
    """What a terminal shows of a run; events change it."""

    def __init__(self, course: Course, step: int = 0, console: Console | None = None) -> None:
        """Begin after a step. `console`: where `shown` draws; None: nowhere."""
        self.course = course
        self.console = console
        self._live: Live | None = None
        self.step = step
        self._train: Train | None = None
        self._evaluated: Evaluated | Validated | None = None
        self._ranks: Ranks | None = None

    def add(self, event: Event) -> None:
        """Show the values of an event."""
        if not isinstance(event, Evaluated | Validated):  # these may come after later steps
            self.step = event.step
        if isinstance(event, Train):
            self._train = event
        elif isinstance(event, Evaluated | Validated):
            self._evaluated = event
        elif isinstance(event, Ranks):
            self._ranks = event
        if self._live:
            self._live.refresh()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the view in this block, below the lines that `say` prints. Events redraw it."""
        if self.console is None:
            yield
            return
        with Live(self, console=self.console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def say(self, line: str) -> None:
        """Print a line, above the view where it is shown."""
        if self._live:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            terminal.say(line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._bar()
        if values := self._values():
            yield Text(values, no_wrap=True, overflow="ellipsis")
        if self._ranks and len(self._ranks.compute_seconds) + ROWS_FOR_LINES <= console.height:
            yield _by_rank(self._ranks)

    def _bar(self) -> Table:
        course, train = self.course, self._train
        line = Table.grid(padding=(0, 2), expand=True)
        cells: list[Text | ProgressBar] = []
        if course.steps_per_epoch and course.total_steps:
            per_epoch = course.steps_per_epoch
            cells.append(Text(f"epoch {self.step / per_epoch:.2f} of {course.total_steps / per_epoch:.4g}"))
        if course.total_steps:
            cells.append(ProgressBar(course.total_steps, self.step))
        cells.append(Text(f"step {self.step:,}" + (f" of {course.total_steps:,}" if course.total_steps else "")))
        if course.total_steps and train and train.images_per_second > 0:
            steps: float = max(0, course.total_steps - self.step)
            if course.sizes:  # the rate is that of the newest steps
                steps = course.sizes.steps_like(max(0, train.step - 1), self.step, course.total_steps)
            seconds = steps * course.global_batch_size / train.images_per_second
            cells.append(Text(f"{clock(seconds)} left"))
        for cell in cells:
            is_bar = isinstance(cell, ProgressBar)
            line.add_column(no_wrap=True, ratio=1 if is_bar else None, min_width=8 if is_bar else None)
        line.add_row(*cells)
        return line

    def _values(self) -> str:
        train, evaluated = self._train, self._evaluated
        found = [f"loss {train.loss:.4f}"] if train else []
        found += [str(evaluated).partition(",")[0]] if evaluated else []
        if train:
            found += [f"{train.images_per_second:,.0f} images/s", f"learning rate {train.learning_rate:.4g}"]
        return "   ".join(found)


def _by_rank(ranks: Ranks) -> Table:
    """A line for each rank: its own time and its waiting time in a step."""
    lines = Table.grid(padding=(0, 2))
    slowest = max(ranks.compute_seconds)
    hosts = ranks.hosts or [""] * len(ranks.compute_seconds)
    for rank, (host, own, wait) in enumerate(zip(hosts, ranks.compute_seconds, ranks.wait_seconds, strict=True)):
        lines.add_row(
            Text(f"rank {rank}" + f" on {printable(host)}" * bool(host), no_wrap=True, overflow="ellipsis"),
            ProgressBar((own + wait) or 1, own, width=12, complete_style="cyan", finished_style="cyan"),
            Text(f"computes {own * 1e3:.1f} ms a step, waits {wait * 1e3:.1f} ms", no_wrap=True),
            Text("slowest" if own == slowest and min(ranks.compute_seconds) < slowest else "", style="yellow"),
        )
    return lines


def clock(seconds: float) -> str:
    """A time as 1:02:03."""
    minutes, second = divmod(round(min(seconds, 1e12)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def in_words(event: Event) -> str | None:
    """A line about an event, where one is shown."""
    if isinstance(event, Train):
        return f"step {event.step}, loss = {event.loss:.4f} ({event.images_per_second:.1f} images/s)"
    if isinstance(event, Evaluated | Validated):
        return f"step {event.step} (epoch {event.epoch:.2f}): {event}"
    return None
