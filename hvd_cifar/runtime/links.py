"""The throughput of this process's TCP connections to other hosts, MPI's and Gloo's, from Linux's counters."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

# Offsets in bytes of counters in struct tcp_info of linux/tcp.h, since Linux 4.10; they count over a connection's life.
BYTES_ACKED, BUSY_MICROSECONDS, RWND_LIMITED_MICROSECONDS = 120, 168, 176
LENGTH = 184


class Links:
    """The rates of connections, by the address of the other host."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}

    def take(self) -> dict[str, float]:
        """Bytes/s since the last call, by address, over the time in which data was in transit.

        This leaves out addresses that got less than 100 kB, and time in which the receiver's window was full.
        """
        now, rates = _counters(), {}
        for address, (sent, busy) in now.items():
            sent_before, busy_before = self._before.get(address, (0, 0))
            if sent - sent_before > 100_000 and busy > busy_before:
                rates[address] = (sent - sent_before) / (busy - busy_before) * 1e6
        self._before = now
        return rates


def _counters() -> dict[str, tuple[int, int]]:
    """Bytes that were acknowledged, and the microseconds in which data was in transit, by address."""
    found: dict[str, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                other, own = connection.getpeername()[0], connection.getsockname()[0]
                if other == own:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LENGTH)
                sent, busy, limited = (
                    struct.unpack_from("Q", info, at)[0]
                    for at in (BYTES_ACKED, BUSY_MICROSECONDS, RWND_LIMITED_MICROSECONDS)
                )
                before = found.get(other, (0, 0))
                found[other] = before[0] + sent, before[1] + max(0, busy - limited)
    return found
