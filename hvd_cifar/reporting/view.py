"""A run's progress on a terminal: a bar with the newest values, and a line for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.errors import printable
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.run_files import Evaluated, Event, Ranks, Train

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
        self._newest: dict[type, Any] = {}  # event by its kind

    def add(self, event: Event) -> None:
        """Show the values of an event."""
        if not isinstance(event, Evaluated):  # these may come after later steps
            self.step = event.step
        self._newest[type(event)] = event
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
        ranks: Ranks | None = self._newest.get(Ranks)
        if ranks and len(ranks.compute_seconds) + ROWS_FOR_LINES <= console.height:
            yield _by_rank(ranks)

    def _bar(self) -> Table:
        """Epoch, a bar, step and time left; without a known length only the step."""
        course, train, step = self.course, self._newest.get(Train), f"step {self.step:,}"
        line = Table.grid(padding=(0, 2), expand=True)
        total, per_epoch = course.total_steps, course.steps_per_epoch
        if not total or not per_epoch:
            line.add_row(step)
            return line
        left = ""
        if train and train.images_per_second > 0:
            steps: float = max(0, total - self.step)
            if course.sizes:  # the rate is that of the newest steps
                steps = course.sizes.steps_like(max(0, train.step - 1), self.step, total)
            left = f"{clock(steps * course.global_batch_size / train.images_per_second)} left"
        for ratio, least in ((None, None), (1, 8), (None, None), (None, None)):
            line.add_column(no_wrap=True, ratio=ratio, min_width=least)
        epoch = f"epoch {self.step / per_epoch:.2f} of {total / per_epoch:.4g}"
        line.add_row(epoch, ProgressBar(total, self.step), f"{step} of {total:,}", left)
        return line

    def _values(self) -> str:
        train, evaluated = self._newest.get(Train), self._newest.get(Evaluated)
        found = [f"loss {train.loss:.4f}"] if train else []
        found += [f"{evaluated.part} accuracy {evaluated.accuracy:.2%}"] if evaluated else []
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
    if isinstance(event, Evaluated):
        results = f"{event.part} accuracy {event.accuracy:.2%}, {event.part} loss {event.loss:.4f}"
        return f"step {event.step} (epoch {event.epoch:.2f}): {results}"
    return None
