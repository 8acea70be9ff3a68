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
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TextIO

CHECKOUT = Path(__file__).resolve().parents[3]
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

    def run(self, command: list[str], env: Mapping[str, str] = os.environ, cwd: Path | None = None) -> None:
        """Run a command with its output in the log. Raises StepFailed."""
        self.log.write(f"\n$ {' '.join(word.splitlines()[0] if word else '...' for word in command)}\n")
        self.log.flush()
        env = {**env, "PIP_USER": "0"}  # pip's `user = true` fails in environments
        nothing, out, kept = subprocess.DEVNULL, self.log, [self.lock]
        done = subprocess.run(command, env=env, cwd=cwd, stdin=nothing, stdout=out, stderr=out, pass_fds=kept)
        if done.returncode:
            raise StepFailed(f"{Path(command[0]).name} ended with exit code {done.returncode}")


@contextlib.contextmanager
def logged(path: Path, lock: int) -> Iterator[Steps]:
    """Steps with a log. If one fails, print the lines of the log that tell why, and raise StepFailed."""
    with path.open("w+") as log:
        try:
            yield Steps(log, lock)
        except (StepFailed, OSError) as error:
            log.flush()
            for line in telling_lines(path.read_text(errors="replace")):
                say(f"    {line}")
            say(f"hvd_cifar: set-up failed ({error}); all output is in {path}")
            raise StepFailed from error


def telling_lines(log: str) -> list[str]:
    """The lines of the last command's output that say what went wrong: the first errors, else the last lines."""
    output = [line.rstrip() for line in log[log.rfind("\n$ ") + 1 :].splitlines()[1:] if line.strip()]
    return [line for line in output if ERROR.search(line)][:SHOWN_LINES] or output[-SHOWN_LINES:]


def say(text: str, end: str = "\n") -> None:
    """Print to stderr: stdout is for the command that follows."""
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[int]:
    """Hold a lock on a file, and yield its descriptor. Prints `waiting` if it has to wait."""
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


@dataclass(frozen=True)
class Environment:
    """What set-up builds for. `folder`: site-packages; `packages`: version by name."""

    folder: Path
    packages: Mapping[str, str]
    abi: str = f"{sysconfig.get_config_var('EXT_SUFFIX')} {sysconfig.get_platform()}"  # of this Python, as there

    @property
    def tensorflow(self) -> str:
        """Package and version, such as "tensorflow-cpu 2.21.0"."""
        name = next(name for name in ("tensorflow-cpu", "tensorflow") if name in self.packages)
        return f"{name} {self.packages[name]}"


def environment_in(venv: Path) -> Environment:
    """The environment in a folder."""
    folder = next(venv.glob("lib/python3*/site-packages"))
    found = distributions(path=[str(folder)])
    return Environment(folder, {str(d.metadata["Name"]).lower().replace("_", "-"): d.version for d in found})


def cache_folder() -> Path:
    """The user's folder for what is built."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "hvd_cifar", "wheels")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(steps: Steps, names: tuple[str, str], made_of: Mapping[str, object], build: Callable[[Path], Path]) -> Path:
    """The file that `build` makes in a folder, from the cache, or built and put there. Raises StepFailed.

    One process per key, `made_of`, builds; others wait for its lock. A finished file's folder appears in the cache in
    one step. `names`: of the step if the file is there already, and if it is built.
    """
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:20]
    folder = cache_folder() / key
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
