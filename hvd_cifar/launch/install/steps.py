"""The steps of set-up: prints one line for each on stderr, and writes the output of commands to a log."""

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
ERROR = re.compile(
    r"error\b|undefined|fatal|not found|no space|denied|timed out|no matching|cannot|failed", re.IGNORECASE
)
# pip's lines that only say that another program failed.
SUMMARY = re.compile(
    r"failed building wheel|failed to build|finished with status|subprocess-exited|exit code|note: this|╰─>|×|^\s*#",
    re.IGNORECASE,
)


class StepFailed(Exception):
    """A command of a step failed; its output is in the log."""


@dataclass
class Steps:
    """Runs commands, with their output in a log. A terminal shows the time that a step has taken."""

    log: TextIO
    # Descriptor of the lock, which commands inherit: if set-up is killed and its pip is not, the next set-up waits.
    lock: int
    _name: str = ""
    _begin: float = 0.0

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print a step's name and, at its end, the time that it took."""
        say(f"  {name} ", end="")
        self._name, self._begin = name, time.monotonic()
        self.log.write(f"\n== {name}\n")
        try:
            yield
        except BaseException:
            self._say("failed\n")
            raise
        self._say(f"{time.monotonic() - self._begin:.1f} s\n")

    def run(self, command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Run a command with its output in the log. Raises StepFailed."""
        self.log.write(f"\n$ {' '.join(word.splitlines()[0] if word else '...' for word in command)}\n")
        self.log.flush()
        with subprocess.Popen(
            command,
            env={**(os.environ if env is None else env), "PIP_USER": "0"},  # pip's `user = true` fails in environments
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[self.lock],
        ) as process:
            try:
                while (code := self._wait(process)) is None:
                    self._say(f"{time.monotonic() - self._begin:.0f} s")
            except BaseException:
                process.kill()
                raise
        if code:
            raise StepFailed(f"{Path(command[0]).name} ended with exit code {code}")

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code; on a terminal None after a second, so that the caller shows progress."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1 if sys.stderr.isatty() and self._name else None)
        return None

    def _say(self, text: str) -> None:
        """Print text after the step's name. On a terminal it replaces the text before."""
        say(f"\r  {self._name} {text}\033[K" if sys.stderr.isatty() else text, end="")


def say(text: str, end: str = "\n") -> None:
    """Print to stderr: stdout is for the command that follows."""
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[int]:
    """Hold a lock on a file, which is made if it is absent, and yield its descriptor.

    Prints `waiting` if it has to wait, and a warning where the file system has no locks.
    """
    # NFS locks a file, but no folder, for all hosts, and only for those who may write the file.
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as failure:  # Lustre has none unless it is mounted with them
            say(f"warning: cannot lock {path} ({failure.strerror}): let no other set-up run there at the same time")
        yield lock
    finally:
        os.close(lock)


def telling_lines(log: str) -> list[str]:
    """The lines of the last command's output that say what went wrong: the first errors, else the last lines.

    A compiler's error is followed by pages in which other programs report that something failed.
    """
    output = [line.rstrip() for line in log[log.rfind("\n$ ") + 1 :].splitlines()[1:] if line.strip()]
    errors = [line for line in output if ERROR.search(line) and not SUMMARY.search(line)]
    return errors[:SHOWN_LINES] or output[-SHOWN_LINES:]
