"""A program that the launcher sends to each host, to find the network between them.

It reads a line, and writes one of JSON: the host's network cards, the ports that it listens at, and at which address
ssh reached it. From each further line it reads addresses and ports, and writes to which of them it could connect. It
ends when its input is closed. It imports nothing of this package, since the host may have another version.
"""

import ipaddress
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

CONNECT_SECONDS = 3.0
# Open MPI's ranks listen at ports from here on (btl_tcp_port_min_v4), the watchdog's at ports that the system chooses.
FIRST_MPI_PORT = 1024


def cards() -> "list[dict[str, object]]":
    """Network cards that are up, except loopback, as fields of `network.Card`."""
    found: list[dict[str, object]] = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        for entry in addresses:
            if entry.family != socket.AF_INET or not state or not state.isup or entry.address.startswith("127."):
                continue
            subnet = ipaddress.ip_network(f"{entry.address}/{entry.netmask or 32}", strict=False)
            card = {"name": name, "address": entry.address, "subnet": str(subnet), "speed": max(0, state.speed)}
            found.append(card)
    return found


def reaches(target: "list[str | int]") -> bool:
    """Whether a connection to [address, port] succeeds."""
    try:
        with socket.create_connection((str(target[0]), int(target[1])), CONNECT_SECONDS):
            return True
    except OSError:
        return False


def listeners() -> "list[socket.socket]":
    """Sockets at a port that the system chooses, and at one as MPI's ranks have. Connections wait in the backlog."""
    found = [socket.create_server(("0.0.0.0", 0), backlog=512)]
    for port in range(FIRST_MPI_PORT, FIRST_MPI_PORT + 100):
        try:
            return [*found, socket.create_server(("0.0.0.0", port), backlog=512)]
        except OSError:
            pass
    return found


def main() -> None:
    """Report, and test connections; see the module."""
    sys.stdin.readline()  # asks for the report
    listening = listeners()
    report = {
        "cards": cards(),
        "ports": [listener.getsockname()[1] for listener in listening],
        "named": " ".join(os.environ.get("SSH_CONNECTION", "").split()[2:3]),  # this end of the connection
    }
    print(json.dumps(report), flush=True)
    with ThreadPoolExecutor(max_workers=32) as pool:
        for targets in sys.stdin:  # the listeners stay open until the launcher closes this program's input
            print(json.dumps(list(pool.map(reaches, json.loads(targets)))), flush=True)


if __name__ == "__main__":
    main()
