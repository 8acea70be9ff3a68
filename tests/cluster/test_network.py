"""Which network a job takes on real hosts, and what is said where it cannot start: one line, before any rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.jobs import launcher, variables


def _dry_run(cluster: Cluster, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A job of a rank on each of two hosts, as it would be started."""
    first = cluster[0]
    hosts: list[str | Path] = ["--hostfile", cluster.hostfile(1, 1)]
    return first.run([*launcher(), "--dry-run", *hosts, *words], env=variables(first))


def test_cards_that_lead_nowhere_are_not_taken(two_hosts: Cluster) -> None:
    """A container bridge with the same address on each host, and a second network without cables."""
    for host, number in zip(two_hosts, (1, 2), strict=True):
        two_hosts.add_interface(host, "docker0", "10.1.0.1/24", connected=False)
        two_hosts.add_interface(host, "ib0", f"10.2.0.{number}/24", connected=False)
    # The names lead to the network without cables: it is tried first.
    for host in two_hosts:
        two_hosts.set_names(host, two_hosts.names() + "10.2.0.1 node1\n")
    done = _dry_run(two_hosts, "train")
    assert done.returncode == 0, done.stderr
    assert "btl_tcp_if_include 10.77.0.0/24 " in done.stdout and "oob_tcp_if_include 10.77.0.0/24 " in done.stdout
    for host in two_hosts:
        two_hosts.set_names(host, two_hosts.names())
        for card in ("docker0", "ib0"):
            host.must("ip", "link", "del", card)


def test_ports_that_mpi_listens_at_are_tried_for_mpi(two_hosts: Cluster) -> None:
    """A firewall that lets the system's usual ports through: not enough for MPI."""
    rule = ["sport", "1024-1200", "blackhole"]
    two_hosts[1].must("ip", "rule", "add", *rule)
    done = _dry_run(two_hosts, "train")
    two_hosts[1].must("ip", "rule", "del", *rule)
    assert done.returncode == 2
    assert "node1 cannot reach node2 at 10.77.0.2, port 1024 (eth0, 10.77.0.0/24)" in done.stderr


def test_unused_gpus_of_another_host_are_told(two_hosts: Cluster) -> None:
    """Of a host that has a rank; the environment of these tests is one for the CPU."""
    first, second = two_hosts
    (second.files / "bin").mkdir()
    nvidia_smi = second.files / "bin" / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'\n")
    nvidia_smi.chmod(0o755)
    settings = second.files / "ssh" / "sshd_config"
    before = settings.read_text()
    settings.write_text(f"{before}SetEnv PATH={two_hosts.own}/bin:/usr/bin:/bin\n")
    os.kill(second.pid, signal.SIGHUP)  # sshd reads its settings again
    done = _dry_run(two_hosts, "train")
    alone = _dry_run(two_hosts, "-np", "1", "train")  # on the first host
    settings.write_text(before)
    os.kill(second.pid, signal.SIGHUP)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "GPUs stay unused (1 on node2)" in done.stderr
    assert done.stderr.endswith("to use them: ./run.sh setup --gpu --hostfile FILE\n")
    assert (alone.returncode, alone.stderr) == (0, "")


FAULTS = {
    "key": "ssh node2: it asks for a password: ssh-copy-id node2",
    "host key": "ssh node2: its key is not known here",
    "name": "ssh node2: no such name",
    "sshd": "ssh node2: no sshd there",
    "environment": "node2 has no environment like this one",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_in_one_line(fault: str, two_hosts: Cluster) -> None:
    first, second = two_hosts
    venv = Path(sys.executable).parents[1]
    changed = {
        "key": second.files / "key.pub",
        "host key": first.files / "known_hosts",
        "name": first.files / "hosts",
        "sshd": first.files / "ssh" / "ssh_config",
    }
    if fault == "environment":
        second.must("mount", "-t", "tmpfs", "tmpfs", venv)
    else:
        before = changed[fault].read_text()
        others = [line for line in before.splitlines(keepends=True) if "node2" not in line]
        changed[fault].write_text(f"{before}  Port 2\n" if fault == "sshd" else "".join(others[: fault != "key"]))
    done = _dry_run(two_hosts, "train")
    if fault == "environment":
        second.must("umount", venv)
    else:
        changed[fault].write_text(before)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert FAULTS[fault] in done.stderr
    assert not second.processes()
