"""The hosts that the other tests here run on: apart in all that a cluster's machines are apart in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.cluster.hosts import Cluster
from tests.ranks import CHECKOUT


def test_hosts_have_own_names_addresses_files_and_processes(four_hosts: Cluster) -> None:
    assert [host.must("hostname").strip() for host in four_hosts] == ["node1", "node2", "node3", "node4"]
    first, second, *_ = four_hosts
    for host in four_hosts:
        assert first.must("ssh", host.name, "hostname").strip() == host.name
        assert f"{host.address}/24" in host.must("ip", "-brief", "address")
    (second.files / "here").touch()
    assert "here" in second.must("ls", four_hosts.own)
    assert "here" not in first.must("ls", four_hosts.own)
    sleeping = first.start(["ssh", "node2", "sleep", "60"])
    _wait_for(lambda: len(second.processes("sleep 60")) == 1)
    assert [p.name() for p in first.processes("sleep 60")] == ["ssh"]
    sleeping.kill()
    for process in second.processes("sleep 60"):
        process.kill()


def test_links_can_be_cut_and_slowed(two_hosts: Cluster) -> None:
    first, second = two_hosts
    reach = ["ssh", "-o", "ConnectTimeout=1", "node2", "true"]
    two_hosts.cut(second)
    assert first.run(reach).returncode == 255
    two_hosts.restore(second)
    first.must("ssh", "-o", "ConnectTimeout=20", "node2", "true")
    copy = ["sh", "-c", "ssh node2 'head -c 200000 /dev/zero' > /dev/null"]
    two_hosts.slow(second, "1mbit")
    first.must(*copy)
    waited = re.search(r"overlimits (\d+)", second.must("tc", "-s", "qdisc", "show", "dev", "eth0"))
    assert waited and int(waited[1]) > 0  # packets had to wait
    two_hosts.restore(second)
    assert "tbf" not in second.must("tc", "qdisc", "show")


def test_nothing_is_left_of_a_cluster_whose_test_is_killed(need_hosts: None, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.cluster.hosts import cluster\n"
        "with cluster(2, Path(sys.argv[1])) as hosts:\n"
        "    print(*(host.pid for host in hosts), flush=True)\n    time.sleep(60)\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "c")]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=_with_checkout())
    assert program.stdout
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2
    children = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(signal.SIGKILL)
    program.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive and not any(psutil.pid_exists(pid) for pid in pids)


def _with_checkout() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CHECKOUT)}


def _wait_for(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)
