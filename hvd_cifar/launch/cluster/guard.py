"""The parent of one rank of horovodrun: `python -m hvd_cifar.launch.cluster.guard SUBNET FOLDER PROGRAM ...`.

It does three things that horovodrun does not. It tells Gloo and NCCL the name of this host's network card on the
subnet, since horovodrun passes one name to all hosts. It starts the rank in the folder if that is there; horovodrun
does so only where the path has no spaces. It ends the rank when its ssh session ends, since ranks would otherwise train
on after a Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from hvd_cifar.runtime.process import signalled_with_parent

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_END = 5.0


def main(argv: list[str]) -> int:
    """Run the program, and end it when its ssh session ends; return its exit code, or 128 + the signal."""
    subnets, folder, *program = argv
    with contextlib.suppress(OSError):
        os.chdir(folder)
    card = card_on(subnets)
    if card is not None:
        # NCCL takes a name after = as exact, not as a prefix.
        os.environ.update(HOROVOD_GLOO_IFACE=card, NCCL_SOCKET_IFNAME=f"={card}")
    starters = starters_of(os.getpid())
    rank = subprocess.Popen(program, preexec_fn=signalled_with_parent(signal.SIGKILL))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: rank.terminate())
    while True:
        try:
            code = rank.wait(SECONDS_BETWEEN_LOOKS)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if not all(starter.is_running() for starter in starters):
                return _end(rank)


def _end(rank: subprocess.Popen[bytes]) -> int:
    rank.terminate()
    try:
        rank.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait()
    return 128 + signal.SIGTERM


def card_on(subnets: str) -> str | None:
    """The name of this host's network card on one of the comma-separated subnets; None: it has none."""
    wanted = [ipaddress.ip_network(subnet) for subnet in subnets.split(",")]
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and any(ipaddress.ip_address(entry.address) in net for net in wanted):
                return name
    return None


def starters_of(pid: int) -> list[psutil.Process]:
    """The parents of a process up to its sshd; [] where horovodrun on this host started it.

    On its own host horovodrun starts ranks as child processes. An sshd above horovodrun is the user's login, which may
    end before the job does. Other ssh servers than OpenSSH have other names: all parents count then.
    """
    found = []
    for parent in psutil.Process(pid).parents():
        found.append(parent)
        if Path(parent.name()).name.startswith("sshd"):
            break
        if "horovodrun" in " ".join(parent.cmdline()):
            return []
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
