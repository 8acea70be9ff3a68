"""Commands on other hosts, without questions to the user; ssh's errors become advice."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from hvd_cifar.errors import UserError

# BatchMode: nobody is there to answer a question. ServerAlive: the connection to a lost host ends after 30 s.
_SETTINGS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
OPTIONS = tuple(word for setting in _SETTINGS for word in ("-o", setting))
NO_SSH = "there is no ssh here: apt-get install openssh-client"
FAILED = 255  # ssh's own exit code; a program may end with it too
# Part of ssh's message, what is wrong, and what to do.
ADVICE = (
    (
        "Host key verification failed",
        "its key is not known here, or has changed",
        "log in once by hand (ssh {host}), after a change: ssh-keygen -R {host}",
    ),
    ("Permission denied", "it asks for a password", "ssh-copy-id {host}"),
    ("Could not resolve hostname", "no such name", "correct it, or add it to /etc/hosts"),
    ("timed out", "no answer", "is it on, and on this network?"),
    ("No route to host", "no way to it", "is it on, and on this network?"),
    ("Connection refused", "no sshd there", "apt-get install openssh-server, on it"),
)


def words(host: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on `host`, quoted for the login shell there, also for csh."""
    line = shlex.join(command)
    if not {"\n", "!"}.isdisjoint(line):  # csh takes neither within quotes
        escaped = line.replace("\\", r"\\").replace("\n", r"\n").replace("!", r"\0041")
        line = shlex.join(["sh", "-c", 'eval "exec $(printf %b "$0")"', escaped])
    return ["ssh", *OPTIONS, host, line]


def ask(host: str, command: Sequence[str], seconds: float, stdin: Any = subprocess.DEVNULL) -> str:
    """What a command prints on a host. Raises UserError where it fails, and where the host does not answer."""
    try:
        done = subprocess.run(words(host, command), stdin=stdin, capture_output=True, timeout=seconds)
    except FileNotFoundError:
        raise UserError(NO_SSH) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"no answer within {seconds:g} s") from None
    complaint = done.stderr.decode(errors="replace")
    if done.returncode == FAILED:
        raise UserError(explain(host, complaint))
    if done.returncode:
        raise UserError((complaint.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.decode(errors="replace")


def diagnose(host: str, complaint: str) -> tuple[str, str]:
    """Why ssh could not reach a host, and what to do, from its stderr."""
    said = [line.strip() for line in complaint.splitlines() if line.strip()]
    for text, what, remedy in ADVICE:
        if any(text in line for line in said):
            return f"ssh {host}: {what}", remedy.format(host=host)
    return f"ssh {host}: {said[-1] if said else 'the connection was lost'}", ""


def explain(host: str, complaint: str) -> str:
    """As `diagnose`, in one line."""
    return ": ".join(filter(None, diagnose(host, complaint)))
