"""Commands on other hosts, without questions to the user; ssh's errors become advice."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# BatchMode: nobody is there to answer a question. ServerAlive: the connection to a lost host ends after 30 s.
_SETTINGS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
OPTIONS = tuple(word for setting in _SETTINGS for word in ("-o", setting))
NO_SSH = "there is no ssh here: apt-get install openssh-client"
FAILED = 255  # ssh's own exit code; a program may end with it too
# Part of ssh's message, what is wrong, and what to do, where the message alone does not tell.
ADVICE = (
    (
        "Host key verification failed",
        "its key is not known here, or has changed",
        "log in once by hand (ssh {host}), after a change: ssh-keygen -R {host}",
    ),
    ("Permission denied", "it asks for a password", "ssh-copy-id {host}"),
)


def words(host: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on `host`, quoted for the login shell there, also for csh."""
    line = shlex.join(command)
    if not {"\n", "!"}.isdisjoint(line):  # csh takes neither within quotes
        escaped = line.replace("\\", r"\\").replace("\n", r"\n").replace("!", r"\0041")
        line = shlex.join(["sh", "-c", 'eval "exec $(printf %b "$0")"', escaped])
    return ["ssh", *OPTIONS, host, line]


def diagnose(host: str, complaint: str) -> tuple[str, str]:
    """Why ssh could not reach a host, and what to do, from its stderr."""
    said = [line.strip() for line in complaint.splitlines() if line.strip()]
    for text, what, remedy in ADVICE:
        if any(text in line for line in said):
            return f"ssh {host}: {what}", remedy.format(host=host)
    what = said[-1].removeprefix("ssh: ") if said else "the connection was lost"
    return f"ssh {host}: {what}", f"log in by hand: ssh {host}"
