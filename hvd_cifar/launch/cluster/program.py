"""Runs a Python program on another host, and exchanges lines of JSON with it."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster import ssh

NO_ENVIRONMENT = "no environment like this one"
SET_UP = "./run.sh setup --hostfile FILE makes it on every host"


class Way(Protocol):
    """How to run commands on another host: the module `ssh`, or `slurm` in an allocation."""

    FAILED: int

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `host`."""

    def diagnose(self, host: str, complaint: str) -> tuple[str, str]:
        """Why the command ended with `FAILED`, and what to do."""


@dataclass(frozen=True)
class Participants:
    """The hosts that take part in a job, and how to run a program on them.

    hosts: their names.
    here: the name of this machine among them, where programs are started directly.
    python: path of the interpreter, the same on every host.
    way: how to run commands on the other hosts.
    """

    hosts: Sequence[str]
    here: str
    python: str
    way: Way = ssh


class Program:
    """A program that runs on one host. The caller must `end` it; on the host it ends when its input is closed."""

    def __init__(self, participants: Participants, host: str, text: str, seconds: float) -> None:
        """Start the program `text` on `host`. It is killed after `seconds`.

        Raises UserError where ssh or srun cannot start here.
        """
        self.host = host
        self.python = participants.python
        self.way = participants.way
        self.late = False
        # The empty line ends what a login shell may have printed without one, such as a terminal's title.
        words = [self.python, "-I", "-c", f"print()\n{text}"]
        command = words if host == participants.here else self.way.words(host, words)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the launcher, which ends this program
            )
        except FileNotFoundError as error:
            raise UserError(ssh.NO_SSH if error.filename == "ssh" else f"there is no {error.filename} here") from None
        except OSError as error:
            raise UserError(f"cannot start {command[0]} for {host}: {error.strerror}") from None
        self._seconds = seconds
        self._limit = threading.Timer(seconds, self._stop)
        self._limit.daemon = True
        self._limit.start()

    def say(self, value: Any) -> None:
        """Send a line; no error if the program has ended."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(value)}\n".encode())
            self.process.stdin.flush()

    def hear(self, start: bytes) -> Any:
        """The next line that begins with `start`, as JSON; None: the program has ended. Skips a login shell's text."""
        assert self.process.stdout
        line = next((line for line in self.process.stdout if line.startswith(start)), b"")
        try:
            return json.loads(line)
        except ValueError:
            return None

    def why(self) -> tuple[str, str]:
        """What is wrong with a host that does not answer, and what to do. Ends the program."""
        try:
            _, complaint = self.process.communicate(timeout=self._seconds)
        except (subprocess.TimeoutExpired, ValueError, OSError):
            complaint = b""
        if self.late:
            return (
                f"{self.host} does not answer within {self._seconds:g} s",
                f"see what it is busy with: ssh {self.host}",
            )
        if self.process.returncode == self.way.FAILED:
            return self.way.diagnose(self.host, complaint.decode(errors="replace"))
        return f"{self.host} has {NO_ENVIRONMENT} ({shlex.quote(self.python)})", SET_UP

    def end(self) -> None:
        """End the program on the host, and ssh or srun here."""
        self._limit.cancel()
        assert self.process.stdin and self.process.stdout and self.process.stderr
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        # Only now: a thread that waits for a line locks its stream until the program ends.
        self.process.stdout.close()
        self.process.stderr.close()

    def _stop(self) -> None:
        self.late = True
        self.process.kill()
