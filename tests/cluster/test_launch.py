"""Jobs over hosts that share nothing but ssh, by mpirun: results, output, exit codes, and nothing left."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from hvd_cifar.errors import RESUME
from tests.cluster.hosts import Cluster, Host
from tests.cluster.jobs import launcher, recorded, training, variables
from tests.ranks import CHECKOUT, wait_for

EXACT = ["--precision", "float64", "--threads-per-rank", "1"]
# Without the watchdog: mpirun notices a lost host by itself.
ENDLESS = ["--max-steps", "1000000", "--checkpoint-every", "1000000", "--stall-seconds", "0"]


@pytest.fixture(scope="module")
def data(embedded: Path) -> Path:
    """The embedded set, on a disk that all hosts share."""
    return embedded


def _launch(host: Host, words: list[str | Path], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return host.run([*launcher(), *words], env=variables(host), timeout=timeout)


@pytest.fixture(scope="module")
def alone(three_hosts: Cluster, data: Path) -> dict[int, float]:
    """The losses of one rank with the same global batch."""
    run_dir = three_hosts.own / "alone"
    done = _launch(three_hosts[0], ["-np", "1", *training(data, run_dir, *EXACT)])
    assert done.returncode == 0, done.stderr
    return runs.losses(three_hosts[0].files / "alone")


def test_hosts_with_uneven_slots_train_as_one(three_hosts: Cluster, data: Path, alone: dict[int, float]) -> None:
    first, name, slots = three_hosts[0], "together", (2, 1, 1)
    words: list[str | Path] = ["-np", str(sum(slots)), "--hostfile", three_hosts.hostfile(*slots)]
    done = _launch(first, [*words, *training(data, three_hosts.own / name, *EXACT)])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("step 4, loss") == 1  # rank 0's output, once
    assert "sent to" not in done.stdout  # all hosts have the data
    facts = recorded(first.files / name)
    assert facts["hosts"] == [f"node{i}" for i, count in enumerate(slots, 1) for _ in range(count)]
    assert facts["controller"] == "mpi"
    found = runs.losses(first.files / name)
    assert len(found) == 4
    assert found == pytest.approx(alone, rel=1e-12)
    assert not any(host.processes() for host in three_hosts)


@pytest.fixture
def endless(three_hosts: Cluster, data: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start a job that would not end, and return when it has made steps.

    Its launcher has no rank beside it, so that no rank learns of its end from another one.
    """
    output = three_hosts.folder / "output"

    def start() -> subprocess.Popen[bytes]:
        words: list[str | Path] = [*launcher(), "-H", "node2:1,node3:1"]
        words += training(data, three_hosts.own / "endless", *ENDLESS)
        with output.open("wb") as file:
            process = three_hosts[0].start(words, env=variables(three_hosts[0]), stdout=file, stderr=file)
        wait_for(lambda: b"step 2, loss" in output.read_bytes(), "step 2", 300, process)
        assert all(host.processes("-m hvd_cifar train") for host in three_hosts)
        return process

    yield start
    for host in three_hosts:
        host.kill_all()
        subprocess.run(["rm", "-rf", *host.files.glob("endless")], check=True)


def test_a_host_that_is_cut_off_ends_the_job_on_both_sides(three_hosts: Cluster, endless: Any) -> None:
    """No connection is closed: only the missing answers show that the host is gone."""
    process = endless()
    three_hosts.cut(three_hosts[2])
    try:
        code, said = process.wait(120), (three_hosts.folder / "output").read_text()
        assert code not in (0, 2), said
        assert "hvd_cifar: node3 is lost" in said
        wait_for(lambda: not any(host.processes() for host in three_hosts), "all processes to end")
    finally:
        three_hosts.restore(three_hosts[2])
        # A bridge lets a cable in again some time after it is there, and the next test's hosts ask each other once.
        reach = "import socket, sys; socket.create_connection((sys.argv[1], 22), 30).close()"
        for one, other in permutations(three_hosts, 2):
            one.must(sys.executable, "-c", reach, other.address)


def test_ctrl_c_leaves_nothing_on_any_host(three_hosts: Cluster, endless: Any) -> None:
    """mpirun takes the request to all hosts."""
    process = endless()
    starts = three_hosts[0].processes("-m hvd_cifar.launch -H")
    assert len(starts) == 1
    starts[0].send_signal(signal.SIGINT)
    assert process.wait(60) == RESUME
    assert "stopped after step" in (three_hosts.folder / "output").read_text()
    wait_for(lambda: not any(host.processes() for host in three_hosts), "all processes to end", 30)
    assert "Traceback" not in (three_hosts.folder / "output").read_text()


def test_a_killed_launcher_leaves_nothing_on_any_host(three_hosts: Cluster, endless: Any) -> None:
    """Nobody is left to tell ranks on other hosts: MPI's daemons see that mpirun is gone."""
    process = endless()
    three_hosts[0].kill_all()
    process.wait(60)
    wait_for(lambda: not any(host.processes() for host in three_hosts), "all processes to end", 30)


def test_the_printed_command_works(three_hosts: Cluster, data: Path) -> None:
    """The command of --dry-run, with a small program instead of the training."""
    first = three_hosts[0]
    train = training(data, three_hosts.own / "never")
    done = _launch(first, ["--dry-run", "--hostfile", three_hosts.hostfile(1, 1, 1), *train])
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert not (first.files / "never").exists()
    assert done.stdout.endswith(f" -m hvd_cifar {shlex.join(train)}\n")
    words = shlex.split(done.stdout)
    assert words.count("10.77.0.0/24") == 2
    done = first.run(["env", *words[: -len(train) - 2], "-c", WHERE], env=variables(first))
    assert sorted(re.findall(r"node\d", done.stdout + done.stderr)) == ["node1", "node2", "node3"]


WHERE = """
import os, sys
print(os.uname().nodename, os.getcwd(), "elsewhere" in "".join(sys.path), sys.argv[1:], file=sys.stderr)
"""


def test_a_users_own_program_runs_in_the_same_folder_on_every_host(three_hosts: Cluster, tmp_path: Path) -> None:
    """Modules of the folder can be imported there, and what PYTHONPATH names."""
    first, folder = three_hosts[0], tmp_path / "my project"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "where.py").write_text(WHERE)
    env = variables(first)
    env["PYTHONPATH"] += ":/elsewhere"
    words = ["-H", "node1:1,node2:1", "python", "-m", "mine.where", "a b"]
    script = f"cd {shlex.quote(str(folder))} && exec {shlex.join([*launcher(), *words])}"
    done = first.run(["sh", "-c", script], env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [
        f"rank {rank} on node{rank + 1}: node{rank + 1} {folder} True ['a b']" for rank in range(2)
    ]


@pytest.mark.parametrize("how", ["--mpi", "--gloo"])
def test_horovodrun_starts_a_program_for_horovod_on_several_hosts(how: str, three_hosts: Cluster) -> None:
    """As its user types it: gradients are averaged under Keras 3, and both ranks end with the same weights."""
    first, program = three_hosts[0], CHECKOUT / "examples/horovod/fit.py"
    words = ["horovodrun", how, "-np", "2", "-H", "node1:1,node2:1", sys.executable, str(program)]
    done = first.run(words, env=variables(first), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, same weights on all ranks: True" in done.stdout


def test_hosts_are_known_by_any_of_their_names(three_hosts: Cluster) -> None:
    """This host with its domain and without, and others whose names begin alike and mean nothing without domains."""
    first, names = three_hosts[0], ("gpu.east.example", "gpu.west.example")
    known = (first.files / "known_hosts").read_text()
    key = known.split(maxsplit=1)[1].splitlines()[0]
    (first.files / "known_hosts").write_text(f"{known}{','.join(names)} {key}\n")
    lines = "127.0.0.1 localhost\n"
    for host, name in zip(three_hosts, ("head.example", *names), strict=True):
        lines += f"{host.address} {name} {host.name}\n"
    try:
        for host in three_hosts:
            three_hosts.set_names(host, lines)
        for own in ("node1", "head.example"):
            first.must("hostname", own)
            for asked in (("node1", names[0]), ("head.example", names[1]), names):
                done = _launch(first, ["-H", ",".join(f"{name}:1" for name in asked), "python", "-c", WHERE])
                assert done.returncode == 0, done.stderr
                found = [line.split(": ")[0] for line in sorted(done.stderr.splitlines())]
                assert found == [f"rank {rank} on {name}" for rank, name in enumerate(asked)]
    finally:
        first.must("hostname", "node1")
        for host in three_hosts:
            three_hosts.set_names(host, three_hosts.names())
