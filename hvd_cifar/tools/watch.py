"""`watch`: show a run that somebody else started, from its files alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rich.console import Console

from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.reporting import goodput, run_files, story, terminal
from hvd_cifar.reporting.run_files import Evaluated
from hvd_cifar.reporting.view import Course, View, in_words
from hvd_cifar.tools.settings import WatchSettings

SECONDS_BETWEEN_LOOKS = 1.0


def watch(settings: WatchSettings) -> None:
    """Show a run until it ends.

    Raises:
        UserError: where there is no run, or a file of it is damaged.
        TrainingError: where the run ends incomplete.
    """
    console = Console()
    is_drawn = console.is_terminal and not settings.quiet
    followed = _Followed(settings, console if is_drawn else None)
    say = followed.view.say if not settings.quiet else lambda line: None
    with followed.view.shown():
        while not (standing := followed.look(say)).is_final:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    if standing.word != "complete":
        raise TrainingError(f"{settings.run_dir}: {standing.text}")
    terminal.say(f"{settings.run_dir}: {standing.text}")


class _Followed:
    """What has been read of a run, and what has been printed."""

    def __init__(self, settings: WatchSettings, console: Console | None = None) -> None:
        """`console`: where the view is drawn. It shows the log lines, so `look` does not print them."""
        self.run_dir = settings.run_dir
        self.is_drawn = console is not None
        self.config = run_files.read_config(self.run_dir)[1]
        facts = self.config.run
        sides, steps = facts.image_heights, facts.all_steps
        sizes = ImageSizes(tuple(sides), steps) if sides and steps else None
        course = Course(self.config.global_batch_size, facts.total_steps, facts.steps_per_epoch, sizes)
        self.view = View(course, console=console)
        self._metrics = run_files.Lines(self.run_dir / "metrics.jsonl")
        self._sessions = run_files.Lines(self.run_dir / goodput.SESSIONS)
        self._marks: list[goodput.Mark] = []
        self._is_first = True
        self._told = 0  # happenings
        self._said_standing = ""

    def look(self, say: Callable[[str], None]) -> story.Standing:
        """Read and print what is new since the last look; return how the run stands."""
        with contextlib.suppress(UserError):  # on a shared disk a read can fail while the file is replaced
            self.config = run_files.read_config(self.run_dir)[1]  # a restart may be on another host
        self._marks += goodput.read("\n".join(self._sessions.read()))
        events = run_files.as_events(self._metrics.read())[0]
        for event in events:
            self.view.add(event)
        happened = story.happenings(self._marks)
        for one in happened[self._told :]:
            say(f"{story.clock(one.time)} {one.text}")
        self._told = len(happened)
        lines = [in_words(event) for event in events if isinstance(event, Evaluated) or not self.is_drawn]
        # At the first look, and after a resumed run has written the file again, all lines but the last are old.
        is_known, self._is_first = self._is_first or self._metrics.replaced, False
        for line in [line for line in lines if line][-1:] if is_known else lines:
            if line:
                say(line)
        return self._standing(say)

    def _standing(self, say: Callable[[str], None]) -> story.Standing:
        alive = run_files.lives(self.run_dir, self.config)
        found = story.standing(self._marks, self.view.step, run_files.last_sign(self.run_dir), alive, time.time())
        if found.word == "running":
            self._said_standing = ""
        elif not found.is_final and not self._said_standing:
            self._said_standing = found.text
            say(f"{found.text}; a launcher may start it again within {story.SECONDS_FOR_RESTART:g} s")
        return found
