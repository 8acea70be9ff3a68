"""Hosts of a cluster on one machine: each has its own network, name, processes, shared memory and sshd.

    with cluster(3, tmp_path) as hosts:
        first, second, third = hosts
        done = first.run(["ssh", "node2", "hostname"])
        hosts.slow(third, "10mbit")

A host is a set of Linux namespaces. Its first process is its sshd; when that ends, everything on the host ends, and
the namespaces go with it, as they do when the test is killed. The hosts' network cards are on a bridge in a
namespace of its own: the machine's network is not changed, and hosts can connect only to each other.

They share the machine's disk, but each has an own /etc/hosts, /etc/ssh, /dev/shm and `Cluster.own`: a folder whose
path is the same on all, and whose contents are each host's own. A shell that ssh starts has the tests' Python, prints
a terminal's title, and has nothing else of root's ~/.bashrc: two shells at once may write complaints there (pyenv's),
which a job's own output would then contain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hvd_cifar.runtime.process import signalled_with_parent
from tests.ranks import wait_for

TOOLS = ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd")
SBIN = "/usr/sbin:/sbin"
PREFIX = "10.77.0"
INTERFACE = "eth0"
UNSHARE = ["unshare", "--fork", "--kill-child=KILL"]
TITLE = "printf '\\033]0;title\\007'"  # as a login shell may print for a terminal: it ends no line
BURST = "32k"  # of a limited link, bytes
# Bytes. `tbf` cuts packets larger than its burst into frames on the processor: 4 MB take 25 ms of it instead of 4.
# A real network card cuts packets itself.
LARGEST_PACKET = "30000"
# No question is ever asked; keys and known hosts are the test's own.
CLIENT = (
    "Host *\n  IdentityFile {own}/key\n  UserKnownHostsFile {own}/known_hosts\n  ConnectTimeout 5\n  LogLevel ERROR\n"
)
SERVER = (
    "HostKey {own}/host_key\nAuthorizedKeysFile {own}/key.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
    "PermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
)


def reason_to_skip() -> str | None:
    """Why hosts cannot be made here; None: they can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root may make"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=_path())]
    if missing:
        return f"hosts need {', '.join(missing)} (Debian: apt-get install iproute2 openssh-server)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "true"])
    return "this machine allows no namespaces" if probe.returncode else None


@dataclass
class Host:
    """One host, seen from outside it. `files`: what the host sees as `Cluster.own`."""

    name: str
    address: str
    files: Path
    own: Path
    init: subprocess.Popen[bytes] | None = None
    pid: int = 0  # of the host's first process, as the machine counts
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def words(self, words: Sequence[str | Path]) -> list[str]:
        """The command that runs `words` on this host, in its `own` folder."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--ipc"]
        return [*inside, f"--wd={self.own}", *map(str, words)]

    def start(self, words: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; options are Popen's. It ends with the host."""
        options = {"stdin": subprocess.DEVNULL, "env": self.environment(), "start_new_session": True, **popen}
        process = subprocess.Popen(self.words(words), **options)
        self._started.append(process)
        return process

    def run(self, words: Sequence[str | Path], timeout: float = 120, **run: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with its output as text."""
        options = {"stdin": subprocess.DEVNULL, "env": self.environment(), "capture_output": True, "text": True, **run}
        return subprocess.run(self.words(words), timeout=timeout, **options)

    def must(self, *words: str | Path) -> str:
        """The output of a command that must succeed on this host."""
        done = self.run(words)
        assert done.returncode == 0, f"{self.name}: {words}: {done.stderr}"
        return done.stdout

    def environment(self) -> dict[str, str]:
        """A user's variables on this host: nothing of a launcher, of MPI or of Horovod."""
        others = ("OMPI_", "OPAL_", "HOROVOD_", "PYTHON", "SSH_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return kept | {"PATH": _path(), "HOME": str(self.own)}

    def processes(self, text: str = "") -> list[psutil.Process]:
        """The host's processes, but for its sshds, whose command line holds `text`; dead ones are left out."""
        try:
            space = os.readlink(f"/proc/{self.pid}/ns/pid")
        except FileNotFoundError:  # the host has ended
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if os.readlink(f"/proc/{process.pid}/ns/pid") != space or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if text in line and line and not line.startswith(("sshd", "/usr/sbin/sshd")):
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """Kill all processes of the host but its sshds."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def end(self) -> None:
        """Turn the host off, as if its power were cut."""
        if self.init is not None:
            self.init.kill()
            self.init.wait()
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@dataclass
class Cluster:
    """Hosts on one bridge. `own` is a path that leads to other files on each of them."""

    folder: Path
    own: Path
    hosts: list[Host] = field(default_factory=list)
    switch: subprocess.Popen[bytes] | None = None
    _switch_pid: int = 0

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def hostfile(self, *slots: int) -> Path:
        """A hostfile with a number of slots for each host in turn. All hosts can read it."""
        path = self.folder / f"hosts-{'-'.join(map(str, slots))}"
        path.write_text("".join(f"{host.name} slots={n}\n" for host, n in zip(self.hosts, slots, strict=False)))
        return path

    def slow(self, host: Host, rate: str) -> None:
        """Limit a host's bandwidth in both directions to `rate`, in tc's notation ("10mbit")."""
        shaping = ["root", "tbf", "rate", rate, "burst", BURST, "latency", "400ms"]
        host.must("tc", "qdisc", "replace", "dev", INTERFACE, *shaping)
        self._on_switch("tc", "qdisc", "replace", "dev", self._port(host, INTERFACE), *shaping)

    def restore(self, host: Host) -> None:
        """Undo `slow` and `cut`."""
        host.must("tc", "qdisc", "replace", "dev", INTERFACE, "root", "noqueue")
        self._on_switch("tc", "qdisc", "replace", "dev", self._port(host, INTERFACE), "root", "noqueue")
        self._on_switch("ip", "link", "set", self._port(host, INTERFACE), "up")

    def cut(self, host: Host) -> None:
        """Pull the host's cable out: it and the others go on, and reach each other no more."""
        self._on_switch("ip", "link", "set", self._port(host, INTERFACE), "down")

    def set_names(self, host: Host, lines: str) -> None:
        """Replace what a host's /etc/hosts says. By default it knows all hosts, itself and localhost."""
        (host.files / "hosts").write_text(lines)

    def names(self) -> str:
        """What each host's /etc/hosts says at the start."""
        return "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.hosts)

    def _port(self, host: Host, interface: str) -> str:
        return f"p{self.hosts.index(host) + 1}{interface}"

    def _on_switch(self, *words: str) -> None:
        _must(["nsenter", "--target", str(self._switch_pid), "--net", *words])

    def add_card(self, host: Host, name: str, address: str, connected: bool) -> None:
        """Add a network card to a host, up, on the bridge or with a cable that leads nowhere."""
        port = self._port(host, name)
        self._on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", name, "netns", str(host.pid))
        if connected:
            self._on_switch("ip", "link", "set", port, "master", "bridge")
        self._on_switch("ip", "link", "set", port, "up")
        self._on_switch("ip", "link", "set", port, "gso_max_size", LARGEST_PACKET)
        host.must("ip", "link", "set", name, "gso_max_size", LARGEST_PACKET)
        host.must("ip", "address", "add", address, "dev", name)
        host.must("ip", "link", "set", name, "up")

    def _start(self, count: int) -> None:
        self.switch, self._switch_pid = _first_process([*UNSHARE, "--net", "sleep", "infinity"], "sleep")
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        key, host_key = self.folder / "key", self.folder / "host_key"
        for path in (key, host_key):
            _must(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])
        for number in range(1, count + 1):
            files = self.folder / f"node{number}"
            files.mkdir()
            self.hosts.append(Host(f"node{number}", f"{PREFIX}.{number}", files, self.own))
        public = host_key.with_suffix(".pub").read_text()
        known = "".join(f"{host.name},{host.address} {public}" for host in self.hosts)
        for host in self.hosts:
            for path in (key, key.with_suffix(".pub"), host_key):
                shutil.copy(path, host.files)
            (host.files / "known_hosts").write_text(known)
            (host.files / "ssh").mkdir()
            (host.files / "ssh" / "ssh_config").write_text(CLIENT.format(own=self.own))
            (host.files / "ssh" / "sshd_config").write_text(SERVER.format(own=self.own))
            (host.files / "bashrc").write_text(f'export PATH="{sys.base_prefix}/bin:$PATH"\n{TITLE}\n')
            self.set_names(host, self.names())
            self.boot(host)
        wait_for(lambda: all(host.run(["ssh", host.name, "true"]).returncode == 0 for host in self.hosts), "the sshds")

    def boot(self, host: Host) -> None:
        """Turn a host on."""
        own = self.own
        script = (
            f"mount --bind {host.files} {own} && mount --bind {own}/hosts /etc/hosts && mount --bind {own}/ssh /etc/ssh"
            f" && {{ [ ! -e ~root/.bashrc ] || mount --bind {own}/bashrc ~root/.bashrc; }}"
            f" && mount -t tmpfs tmpfs /dev/shm && hostname {host.name} && ip link set lo up && mkdir -p /run/sshd"
            " && exec /usr/sbin/sshd -D"
        )
        spaces = ["--net", "--uts", "--mount", "--pid", "--ipc", "--mount-proc"]
        host.init, host.pid = _first_process([*UNSHARE, *spaces, "sh", "-c", script], "sshd", host.files / "boot.log")
        self.add_card(host, INTERFACE, f"{host.address}/24", connected=True)

    def _end(self) -> None:
        for host in self.hosts:
            host.end()
        if self.switch is not None:
            self.switch.kill()
            self.switch.wait()


@contextlib.contextmanager
def cluster(count: int, folder: Path) -> Iterator[Cluster]:
    """`count` hosts, node1 and so on, that know and trust each other; they end with the block. `folder` is empty."""
    own = folder / "own"
    own.mkdir(parents=True)
    made = Cluster(folder, own)
    try:
        made._start(count)
        yield made
    finally:
        made._end()


def _first_process(words: list[str], name: str, log: Path | None = None) -> tuple[subprocess.Popen[bytes], int]:
    """Start `unshare ... PROGRAM`; its process, and the id of the program it became the parent of, called `name`."""
    with open(log or os.devnull, "wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PATH": _path()},
            preexec_fn=signalled_with_parent(signal.SIGKILL),  # hosts end with a test that is killed
        )
    found: list[psutil.Process] = []

    def is_there() -> bool:
        said = log.read_text() if log else ""
        assert process.poll() is None, f"{words} ended: {said}"
        found[:] = [child for child in psutil.Process(process.pid).children() if child.name() == name]
        return bool(found)

    wait_for(is_there, name)
    return process, found[0].pid


def _must(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": _path()})
    assert done.returncode == 0, f"{words}: {done.stderr}"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), SBIN])
