"""What a host says of itself to one that wants to start ranks there: a program that is sent to it over ssh.

It writes a line of JSON (its name, its network cards, the ports that it listens at), reads one (addresses and ports to
try), writes which of them it reached, and ends; it ends, too, when the asking side goes away. It imports nothing of
this package, whose version there may be another one.
"""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

CONNECT_SECONDS = 3.0
FIRST_MPI_PORT = 1024  # Open MPI's ranks listen from there on (btl_tcp_port_min_v4); Gloo's where the system says


def interfaces() -> "list[dict[str, object]]":
    """IPv4 addresses of cards that are up, this machine's talk to itself left out; `speed` in Mbit/s, 0: not known."""
    found: list[dict[str, object]] = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        for entry in addresses:
            if entry.family != socket.AF_INET or not state or not state.isup or entry.address.startswith("127."):
                continue
            mask = entry.netmask or "255.255.255.255"
            found.append({"name": name, "address": entry.address, "netmask": mask, "speed": max(0, state.speed)})
    return found


def resolves(name: str) -> bool:
    """Whether this host knows an address for a name."""
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True


def reaches(target: "list[str | int]") -> bool:
    """Whether something answers at [address, port]."""
    try:
        with socket.create_connection((str(target[0]), int(target[1])), CONNECT_SECONDS):
            return True
    except OSError:
        return False


def listeners() -> "list[socket.socket]":
    """Listening where Gloo's ranks would, and where MPI's would. Connections wait there: nobody need accept them."""
    found = [socket.create_server(("0.0.0.0", 0), backlog=512)]
    for port in range(FIRST_MPI_PORT, FIRST_MPI_PORT + 100):
        try:
            return [*found, socket.create_server(("0.0.0.0", port), backlog=512)]
        except OSError:
            pass
    return found


def list_gpus() -> str:
    """What `nvidia-smi -L` prints, or nothing where it cannot run. The asking side counts the GPUs."""
    try:
        words, nothing = ["nvidia-smi", "-L"], subprocess.DEVNULL
        return subprocess.run(words, stdin=nothing, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def main() -> None:
    """See the module."""
    listening = listeners()
    name = socket.gethostname()
    report = {
        "hostname": name,
        "resolves_itself": resolves(name),
        "interfaces": interfaces(),
        "ports": [listener.getsockname()[1] for listener in listening],
        "nvidia_smi": list_gpus(),
        "variables": {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"},
    }
    print(json.dumps(report), flush=True)
    asked = sys.stdin.readline()
    if not asked:
        return
    targets = json.loads(asked)
    with ThreadPoolExecutor(max_workers=32) as pool:
        print(json.dumps(list(pool.map(reaches, targets))), flush=True)
    # The listeners stay until all hosts have tried: the asking side then closes this side's input.
    sys.stdin.read()


if __name__ == "__main__":
    main()
