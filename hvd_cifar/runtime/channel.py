"""Short questions between the ranks' watchdogs: a line of text, and a line of JSON in answer, over TCP.

Like MPI's and Gloo's ports these are open to the job's network: whoever reaches one may read a rank's status. Nothing
is unpickled. Every wait has a time-out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

SECONDS = 2.0  # for an answer
SECONDS_BEFORE_ANOTHER = 0.1  # before another connection is accepted, where one could not be
LONGEST = 1 << 16  # bytes of a line
# Why there is no answer.
SILENT = "it does not answer"  # the process accepts a connection
GONE = "its process has ended"
UNREACHABLE = "its host cannot be reached"

Address = tuple[str, int]


class NoAnswer(Exception):
    """A process does not answer; the text is one of the reasons above."""


def listen(host: str, answer: Callable[[str], Mapping[str, Any]]) -> Address:
    """Answer questions on a free port of `host`, in a thread, until the process ends; return the address."""
    server = socket.create_server((host, 0))

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), peer, peer.makefile("rb") as lines:
            peer.settimeout(SECONDS)
            question = lines.readline(LONGEST).decode().strip()
            peer.sendall(json.dumps(answer(question)).encode() + b"\n")

    def accept() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                time.sleep(SECONDS_BEFORE_ANOTHER)  # too many open files, or the like, which may pass
            else:
                in_thread(serve, peer)

    in_thread(accept)
    return host, server.getsockname()[1]


def in_thread(function: Callable[..., None], *arguments: Any) -> threading.Thread | None:
    """Call a function in a new thread; in this one, which returns None, while Python ends and starts no thread."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        function(*arguments)
        return None
    return thread


def ask(address: Address, question: str) -> dict[str, Any]:
    """The answer to a question, a word or some. Raises NoAnswer."""
    try:
        peer = socket.create_connection(address, SECONDS)
    except ConnectionRefusedError:
        raise NoAnswer(GONE) from None
    except OSError:
        raise NoAnswer(UNREACHABLE) from None
    try:
        with peer, peer.makefile("rb") as lines:
            peer.sendall(question.encode() + b"\n")
            said = lines.readline(LONGEST)
    except ConnectionError:
        raise NoAnswer(GONE) from None
    except OSError:
        raise NoAnswer(SILENT) from None
    if not said:
        raise NoAnswer(GONE)
    found: dict[str, Any] = json.loads(said)
    return found


def address_here(one_host: bool, environ: Mapping[str, str] = os.environ) -> str:
    """This host's address for other ranks: on the job's network where the launcher names one."""
    if one_host:
        return "127.0.0.1"
    names = [environ.get("HOROVOD_GLOO_IFACE", ""), *environ.get("OMPI_MCA_btl_tcp_if_include", "").split(",")]
    networks = [ipaddress.ip_network(name, strict=False) for name in names if "/" in name]
    cards = psutil.net_if_addrs().items()
    found = [(card, a.address) for card, every in cards for a in every if a.family == socket.AF_INET]
    for card, address in found:
        if card in names or any(ipaddress.ip_address(address) in network for network in networks):
            return address
    return next((address for _, address in found if not address.startswith("127.")), "127.0.0.1")
