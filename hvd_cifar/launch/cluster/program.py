"""A Python program that is sent to another host, and talks with this side in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster import ssh

NO_ENVIRONMENT = "no environment like this one"
SET_UP = "./run.sh setup --hostfile FILE makes it on every host"


class Way(Protocol):
    """How to run something on another host: the module `ssh`, or `slurm` within an allocation."""

    FAILED: int

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `host`."""

    def diagnose(self, host: str, complaint: str) -> tuple[str, str]:
        """Why it ended with `FAILED`, and what to do."""


class Program:
    """A program as it runs on one host; `end` it in any case. On the other side it ends when its input does."""

    def __init__(self, host: str, is_here: bool, python: str, text: str, seconds: float, way: Way = ssh) -> None:
        """Start it.

        Args:
            host: its name; is_here: whether that is this machine, where it is started directly.
            python: the interpreter, at the same path on every host.
            text: the program.
            seconds: after so long it is ended, whatever it does.
            way: to another host.

        Raises UserError where ssh, or what else leads there, is not to be had.
        """
        words = [python, "-I", "-c", text]
        self.host = host
        self.python = python
        self.way = way
        self.late = False
        try:
            self.process = subprocess.Popen(
                words if is_here else way.words(host, words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the launcher, which ends this
            )
        except FileNotFoundError as error:
            raise UserError(ssh.NO_SSH if error.filename == "ssh" else f"there is no {error.filename} here") from None
        self._seconds = seconds
        self._limit = threading.Timer(seconds, self._stop)
        self._limit.daemon = True
        self._limit.start()

    def say(self, value: Any) -> None:
        """Send a line. A program that is gone does not hear it."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(value)}\n".encode())
            self.process.stdin.flush()

    def hear(self, start: bytes) -> Any:
        """The next line that starts so, as JSON: a login shell may write lines of its own. None: there is no more."""
        assert self.process.stdout
        line = next((line for line in self.process.stdout if line.startswith(start)), b"")
        try:
            return json.loads(line)
        except ValueError:
            return None

    def why(self) -> tuple[str, str]:
        """What is wrong with a host that does not answer, and what mends it; ends the program."""
        try:
            _, complaint = self.process.communicate(timeout=self._seconds)
        except (subprocess.TimeoutExpired, ValueError, OSError):
            complaint = b""
        if self.late:
            return (
                f"{self.host} does not answer within {self._seconds:g} s",
                f"look what it is busy with: ssh {self.host}",
            )
        if self.process.returncode == self.way.FAILED:
            return self.way.diagnose(self.host, complaint.decode(errors="replace"))
        return f"{self.host} has {NO_ENVIRONMENT} ({shlex.quote(self.python)})", SET_UP

    def end(self) -> None:
        """Let the program on the host end, and ssh or srun with it."""
        self._limit.cancel()
        assert self.process.stdin and self.process.stdout and self.process.stderr
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        # Only now: a thread that waits for a line holds on to its stream until the program is gone.
        self.process.stdout.close()
        self.process.stderr.close()

    def _stop(self) -> None:
        self.late = True
        self.process.kill()
