"""Short questions between the ranks' watchdogs: one line of JSON and one in answer, over TCP, without Horovod.

The job's secret authenticates both lines: each has an HMAC-SHA256 over itself and a random number that the asked side
draws. Nothing is unpickled. Every wait has a time-out.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
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


def listen(
    host: str, secret: Callable[[], str], answer: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[Address, Callable[[], None]]:
    """Answer questions on a free port of `host`, in a thread; return the address, and a function that ends it.

    `secret` is called at each question.
    """
    server = socket.create_server((host, 0))
    ended = threading.Event()

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), peer, peer.makefile("rb") as lines:
            peer.settimeout(SECONDS)
            number = secrets.token_hex(16).encode()
            peer.sendall(number + b"\n")
            question = lines.readline(LONGEST)
            if hmac.compare_digest(lines.readline(LONGEST), _sign(secret(), number + question)):
                said = json.dumps(answer(json.loads(question))).encode() + b"\n"
                peer.sendall(said + _sign(secret(), number + b"answer" + said))

    def accept() -> None:
        while not ended.is_set():
            try:
                peer, _ = server.accept()
            except OSError:
                ended.wait(SECONDS_BEFORE_ANOTHER)  # too many open files, or the like, which may pass
            else:
                in_thread(serve, peer)

    def end() -> None:
        ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` would not
        server.close()

    in_thread(accept)
    return (host, server.getsockname()[1]), end


def in_thread(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Call a function in a new thread; in this one while Python ends, when it starts no thread."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        function(*arguments)
    return thread


def ask(address: Address, secret: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question. Raises NoAnswer."""
    try:
        peer = socket.create_connection(address, SECONDS)
    except ConnectionRefusedError:
        raise NoAnswer(GONE) from None
    except OSError:
        raise NoAnswer(UNREACHABLE) from None
    try:
        with peer, peer.makefile("rb") as lines:
            number = lines.readline(LONGEST).strip()
            line = json.dumps(dict(question)).encode() + b"\n"
            peer.sendall(line + _sign(secret, number + line))
            said = lines.readline(LONGEST)
            if not hmac.compare_digest(lines.readline(LONGEST), _sign(secret, number + b"answer" + said)):
                raise ConnectionError
            answer: dict[str, Any] = json.loads(said)
            return answer
    except ConnectionError:
        raise NoAnswer(GONE) from None
    except (OSError, ValueError):
        raise NoAnswer(SILENT) from None


def _sign(secret: str, line: bytes) -> bytes:
    return hmac.new(secret.encode(), line, hashlib.sha256).hexdigest().encode() + b"\n"


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
