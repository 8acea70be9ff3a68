"""The doctor on real hosts: all is well where all is well, and every fault that is planted is named, with its host.

Each test of faults has hosts of its own: nothing is left over from another one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Cluster, Host, cluster
from tests.cluster.jobs import launcher, variables

SECONDS = 500
PATIENT = ["--probe-timeout", "200", "--job-timeout", "400"]  # these hosts share few cores
# Stands for a GPU, which cannot be had here.
NVIDIA_SMI = "#!/bin/sh\ncase $1 in -L) echo 'GPU 0: NVIDIA H200 (UUID: GPU-a)' ;; *) echo 570.86.15 ;; esac\n"


def _doctor(hosts: Cluster, *words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, all of the JSON, and stderr of a doctor on the first host."""
    first = hosts[0]
    done = first.run([*launcher(), "doctor", "--json", *PATIENT, *words], env=variables(first), timeout=SECONDS)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def _found(said: dict[str, Any]) -> dict[str, list[str]]:
    """Of each check that is not ok, its findings as "level host: text -> advice"."""
    found: dict[str, list[str]] = {}
    for f in said["findings"]:
        if f["level"] != "ok":
            found.setdefault(f["check"], []).append(f"{f['level']} {f['host']}: {f['text']} -> {f['remedy']}")
    return found


def test_healthy_hosts_are_well(three_hosts: Cluster) -> None:
    code, said, errors = _doctor(three_hosts, "--hostfile", three_hosts.hostfile(2, 1, 1), "--allreduce", "ring")
    names = ["node1", "node2", "node3"]
    # Hosts that share cores may slow each other's messages; nothing else is to be found.
    found = _found(said)
    assert code == 0 and set(found) <= {"job"}, (found, errors)
    assert len({f["check"] for f in said["findings"]}) == 8
    assert {name: card["name"] for name, card in said["network"]["cards"].items()} == dict.fromkeys(names, "eth0")
    job = said["job"]
    assert job["wrong_values"] == 0 and job["bytes_per_second"] > 0 and not job["failure"]
    assert "over mpi (ring; TCP 10.77.0.0/24)" in job["how"]
    assert not any(host.processes() for host in three_hosts)


def _plant_other_version(host: Host) -> None:
    info = next(Path(sysconfig.get_path("purelib")).glob("numpy-*.dist-info"))
    other = host.files / "numpy"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.0.99\n")
    host.must("mount", "--bind", host.own / "numpy", info)


def _set_for_logins(host: Host, **variables: str) -> None:
    """Variables that everything has which is started there over ssh."""
    settings = host.files / "ssh" / "sshd_config"
    pairs = " ".join(f"{name}={value}" for name, value in variables.items())
    settings.write_text(f"{settings.read_text()}SetEnv {pairs}\n")
    os.kill(host.pid, signal.SIGHUP)  # sshd reads its settings again


def test_planted_faults_are_named(need_hosts: None, tmp_path: Path) -> None:
    with cluster(5, tmp_path / "cluster") as hosts:
        first, second, third, fourth, fifth = hosts
        # On the first: too little shared memory.
        first.must("mount", "-o", "remount,size=64k", "/dev/shm")
        # On the second: another version.
        _plant_other_version(second)
        # On the third: a firewall, and a full disk.
        third.must("ip", "rule", "add", "sport", "32768-65534", "blackhole")
        (third.files / "tmp").mkdir()
        third.must("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", hosts.own / "tmp")
        _set_for_logins(third, TMPDIR=f"{hosts.own}/tmp")
        # On the fourth: a slow link.
        hosts.slow(fourth, "10mbit")
        # On the fifth: an unused GPU.
        (fifth.files / "bin").mkdir()
        (fifth.files / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
        (fifth.files / "bin" / "nvidia-smi").chmod(0o755)
        _set_for_logins(fifth, PATH=f"{hosts.own}/bin:/usr/bin:/bin")

        hostfile = hosts.hostfile(3, 1, 1, 1, 1)
        code, said, errors = _doctor(hosts, "--hostfile", hostfile)
        found = _found(said)

        def is_named(check: str, start: str, *parts: str) -> None:
            lines = [line for line in found.pop(check, []) if line.startswith(start)]
            assert len(lines) == 1 and all(part in lines[0] for part in parts), (check, lines, said["findings"])

        assert code == 1 and "a run would fail: network, versions on node2, " in errors, errors
        is_named("shared memory", "warning node1: 64.0 KiB free in /dev/shm", "--shm-size")
        is_named("versions", "failure node2: numpy 2.0.99, not ", f"./run.sh setup --hostfile {hostfile}")
        is_named("network", "failure : ", "node3", "firewalls, which must let all ports through")
        is_named("disk", f"failure node3: nothing can be written to {hosts.own}/tmp: No space left on device")
        is_named(
            "GPUs", "warning node5: 1 GPU, but the environment is for the CPU", f"setup --hostfile {hostfile} --gpu"
        )
        is_named("job", "warning : not started")
        assert not found

        # Without these hosts the job runs, and is slow.
        code, said, errors = _doctor(hosts, "-H", "node1:2,node4:1,node5:1")
        found = _found(said)
        assert code == 0 and found["job"][0].startswith("warning : all-reduces are slow: "), (found, errors)
        assert said["job"]["bytes_per_second"] * 8 < 30e6
        assert not any(host.processes() for host in hosts)


def test_hosts_that_do_not_answer_are_named(need_hosts: None, tmp_path: Path) -> None:
    """Off, not to be logged in to, unknown, without an environment."""
    with cluster(5, tmp_path / "cluster") as hosts:
        first, second, third, fourth, fifth = hosts
        second.end()
        (third.files / "key.pub").write_text("")
        known = (first.files / "known_hosts").read_text().splitlines(keepends=True)
        (first.files / "known_hosts").write_text("".join(line for line in known if "node4" not in line))
        fifth.must("mount", "-t", "tmpfs", "tmpfs", Path(sys.executable).parents[1])
        options: list[str | Path] = ["--hostfile", hosts.hostfile(1, 1, 1, 1, 1)]
        code, said, _ = _doctor(hosts, *options)
        assert code == 1
        found = _found(said)
        silent = sorted(found["ssh"])
        assert len(silent) == 4
        assert re.match("failure node2: ssh node2: connect to host node2 .* -> log in by hand: ssh node2", silent[0])
        assert silent[1] == "failure node3: ssh node3: it asks for a password -> ssh-copy-id node3"
        assert silent[2].startswith("failure node4: ssh node4: its key is not known here") and "ssh node4" in silent[2]
        assert silent[3].startswith("failure node5: node5 has no environment like this one")
        assert f"./run.sh setup --hostfile {options[1]}" in silent[3]
        assert said["job"] is None
