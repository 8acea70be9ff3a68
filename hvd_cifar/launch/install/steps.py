"""Run and report the steps of set-up: one line each on the screen, everything else in a log."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

SHOWN_LINES = 12
NEWLINE = "\n"
ERROR = re.compile(
    r"error\b|undefined|fatal|not found|no space|denied|timed out|no matching|cannot|failed", re.IGNORECASE
)
# pip's own summary of somebody else's error.
SUMMARY = re.compile(
    r"failed building wheel|failed to build|finished with status|subprocess-exited|exit code|note: this|╰─>|×|^\s*#",
    re.IGNORECASE,
)


class StepFailed(Exception):
    """A command of a step failed; its output is in the log."""


@dataclass(frozen=True)
class Steps:
    """Where commands write, and the lock that they hold."""

    log: TextIO
    # Handed on to every command: when set-up is killed and its pip lives on, the next set-up waits for that pip.
    lock: int

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show a step's name, and when it is over how long it took."""
        say(f"  {name} ", end="")
        begin = time.monotonic()
        self.log.write(f"\n== {name}\n")
        try:
            yield
        except BaseException:
            say("failed")
            raise
        say(f"{time.monotonic() - begin:.1f} s")

    def run(self, command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Run a command with its output in the log. Raises StepFailed."""
        self.log.write(f"\n$ {' '.join(word.partition(NEWLINE)[0] or '...' for word in command)}\n")
        self.log.flush()
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[self.lock],
        )
        if done.returncode:
            raise StepFailed(f"{Path(command[0]).name} ended with exit code {done.returncode}")


def say(text: str, end: str = "\n") -> None:
    """Tell the user, on stderr: stdout belongs to the command that follows."""
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[int]:
    """Hold a lock on a file or folder that exists, and yield its descriptor. Says `waiting` if it has to wait."""
    lock = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def telling_lines(log: str) -> list[str]:
    """The lines of the last command's output that tell what went wrong.

    A compiler's error is followed by pages of others' complaints that something failed; so the first lines that
    look like an error come first, and only where there are none, the last lines of all.
    """
    output = [line.rstrip() for line in log[log.rfind("\n$ ") + 1 :].splitlines()[1:] if line.strip()]
    errors = [line for line in output if ERROR.search(line) and not SUMMARY.search(line)]
    return errors[:SHOWN_LINES] or output[-SHOWN_LINES:]
