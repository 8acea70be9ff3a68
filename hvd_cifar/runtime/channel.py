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
LONGEST = 1 << 20  # bytes of a line

Address = tuple[str, int]


class Silent(Exception):
    """The process accepts a connection, and does not answer."""


class Gone(Exception):
    """The process has ended."""


class Unreachable(Exception):
    """The host of the process cannot be reached."""


def listen(
    host: str, secret: Callable[[], str], answer: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[Address, Callable[[], None]]:
    """Answer questions on a free port of `host`, in a thread; return the address, and a function that ends it.

    `secret` is called at each question.
    """
    server = socket.create_server((host, 0))
    ended = threading.Event()

    def serve(peer: socket.socket) -> None:
        try:
            with peer, peer.makefile("rb") as lines:
                peer.settimeout(SECONDS)
                number = secrets.token_hex(16)
                peer.sendall(number.encode() + b"\n")
                question = lines.readline(LONGEST)
                if hmac.compare_digest(lines.readline(LONGEST).strip(), _sign(secret(), number, question)):
                    said = json.dumps(answer(json.loads(question))).encode() + b"\n"
                    peer.sendall(said + _sign(secret(), number, b"answer" + said) + b"\n")
        except (OSError, ValueError):
            pass  # the other side notices that it gets no answer

    def accept() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                if ended.wait(SECONDS_BEFORE_ANOTHER):  # else too many open files, or the like, which may pass
                    return
                continue
            try:
                threading.Thread(target=serve, args=[peer], daemon=True).start()
            except RuntimeError:  # Python is ending, and starts no thread
                serve(peer)

    def end() -> None:
        ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` would not
        server.close()

    threading.Thread(target=accept, daemon=True).start()
    return (host, server.getsockname()[1]), end


def ask(address: Address, secret: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question.

    Raises:
        Silent, Gone, Unreachable: where there is none.
    """
    try:
        peer = socket.create_connection(address, SECONDS)
    except ConnectionRefusedError:
        raise Gone from None
    except OSError:
        raise Unreachable from None
    try:
        with peer, peer.makefile("rb") as lines:
            number = lines.readline(LONGEST).decode().strip()
            line = json.dumps(dict(question)).encode() + b"\n"
            peer.sendall(line + _sign(secret, number, line) + b"\n")
            said = lines.readline(LONGEST)
            if not hmac.compare_digest(lines.readline(LONGEST).strip(), _sign(secret, number, b"answer" + said)):
                raise Gone
            answer: dict[str, Any] = json.loads(said)
            return answer
    except ConnectionError:
        raise Gone from None
    except (OSError, ValueError):
        raise Silent from None


def _sign(secret: str, number: str, line: bytes) -> bytes:
    return hmac.new(secret.encode(), number.encode() + line, hashlib.sha256).hexdigest().encode()


def address_here(one_host: bool, environ: Mapping[str, str] = os.environ) -> str:
    """This host's address for other ranks: on the job's network where the launcher names one."""
    if one_host:
        return "127.0.0.1"
    card = environ.get("HOROVOD_GLOO_IFACE", "")
    subnets = environ.get("OMPI_MCA_btl_tcp_if_include", "").split(",")
    own = [
        (name, a.address) for name, every in psutil.net_if_addrs().items() for a in every if a.family == socket.AF_INET
    ]
    for name, address in own:
        if name == card or name in subnets or any("/" in s and _is_in(address, s) for s in subnets):
            return address
    return next((address for _, address in own if not address.startswith("127.")), "127.0.0.1")


def _is_in(address: str, subnet: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(subnet, strict=False)
