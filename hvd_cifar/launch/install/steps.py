"""The steps of set-up: each prints one line on stderr, and writes the output of its commands to a log.

What set-up builds, it builds once for a user, and keeps under a hash of everything that it is built from.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

SHOWN_LINES = 8
ERROR = re.compile(
    r"error\b|undefined|fatal|not found|no space|denied|timed out|no matching|cannot|failed", re.IGNORECASE
)


class StepFailed(Exception):
    """A command of a step failed; its output is in the log."""


@dataclass
class Steps:
    """Runs commands, with their output in a log."""

    log: TextIO
    # Descriptor of the lock, which commands inherit: if set-up is killed and its pip is not, the next set-up waits.
    lock: int

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print a step's name and, at its end, the time that it took."""
        say(f"  {name} ", end="")
        self.log.write(f"\n== {name}\n")
        begin = time.monotonic()
        try:
            yield
        except BaseException:
            say("failed")
            raise
        say(f"{time.monotonic() - begin:.1f} s")

    def run(self, command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Run a command with its output in the log. Raises StepFailed."""
        self.log.write(f"\n$ {' '.join(word.splitlines()[0] if word else '...' for word in command)}\n")
        self.log.flush()
        env = {**(os.environ if env is None else env), "PIP_USER": "0"}  # pip's `user = true` fails in environments
        nothing = subprocess.DEVNULL
        out, inherited = self.log, [self.lock]
        done = subprocess.run(command, env=env, cwd=cwd, stdin=nothing, stdout=out, stderr=out, pass_fds=inherited)
        if done.returncode:
            raise StepFailed(f"{Path(command[0]).name} ended with exit code {done.returncode}")


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


def cache_folder(environ: Mapping[str, str], otherwise: Path) -> Path:
    """The user's folder for what is built, or `otherwise` if that is not writable."""
    home = environ.get("HOME", "")
    base = environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else "")
    folder = Path(base, "hvd_cifar", "wheels") if os.path.isabs(base) else otherwise
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = otherwise
    if not os.access(folder, os.W_OK):
        folder = otherwise
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(
    steps: Steps, names: tuple[str, str], made_of: Mapping[str, object], otherwise: Path, build: Callable[[Path], Path]
) -> Path:
    """The file that `build` makes in a folder, from the cache, or built and put there. Raises StepFailed.

    One process per key builds; others wait for its lock. A finished file's folder appears in the cache in one step.

    Args:
        names: of the step if the file is there already, and if it is built.
        made_of: everything that the file depends on.
        otherwise: the folder if the user's own is not writable.
        build: gets a temporary folder.
    """
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:20]
    folder = cache_folder(os.environ, otherwise) / key
    waiting = f"another set-up builds the same {names[1].split(':')[0]}: waiting for it"
    with locked(folder.with_suffix(".lock"), waiting):
        if folder.is_dir() and (found := next(filter(Path.is_file, folder.iterdir()), None)):
            with steps.step(names[0]):
                return found
        with steps.step(names[1]), tempfile.TemporaryDirectory(prefix="hvd_cifar-") as work:
            made = build(Path(work))
            partial = folder.with_suffix(".partial")  # beside its place, since /tmp may be another disk
            for old in (partial, folder):
                shutil.rmtree(old, ignore_errors=True)
            partial.mkdir()
            shutil.copy(made, partial)
            partial.rename(folder)
        return folder / made.name


def telling_lines(log: str) -> list[str]:
    """The lines of the last command's output that say what went wrong: the first errors, else the last lines.

    A compiler's error is followed by pages in which other programs report that something failed.
    """
    output = [line.rstrip() for line in log[log.rfind("\n$ ") + 1 :].splitlines()[1:] if line.strip()]
    return [line for line in output if ERROR.search(line)][:SHOWN_LINES] or output[-SHOWN_LINES:]
