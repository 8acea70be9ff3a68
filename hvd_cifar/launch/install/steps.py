"""The steps of set-up: one line each on stderr, the output of their commands in a log."""

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
# pip's summaries of another program's error.
SUMMARY = re.compile(
    r"failed building wheel|failed to build|finished with status|subprocess-exited|exit code|note: this|╰─>|×|^\s*#",
    re.IGNORECASE,
)


class StepFailed(Exception):
    """A command of a step failed; its output is in the log."""


@dataclass(frozen=True)
class Steps:
    """The log of the commands, and the lock that they hold."""

    log: TextIO
    # Every command inherits it: if set-up is killed while its pip runs on, the next set-up waits for that pip.
    lock: int

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print a step's name, and at its end the time that it took."""
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
    """Print to stderr: stdout is for the command that follows."""
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[int]:
    """Hold a lock on an existing file or folder, and yield its descriptor. Prints `waiting` if it has to wait."""
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
    """The lines of the last command's output that say what went wrong: the first errors, else the last lines.

    After a compiler's error come pages of other programs' messages that something failed.
    """
    output = [line.rstrip() for line in log[log.rfind("\n$ ") + 1 :].splitlines()[1:] if line.strip()]
    errors = [line for line in output if ERROR.search(line) and not SUMMARY.search(line)]
    return errors[:SHOWN_LINES] or output[-SHOWN_LINES:]
