"""Data without a shared disk: hosts that lack the set are sent rank 0's, and hosts that have another one are named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_cifar.data.host_files import digest_of
from hvd_cifar.data.synthetic import LAYOUT
from tests.cluster.hosts import Cluster
from tests.cluster.jobs import launcher, training, variables


@pytest.fixture(scope="module")
def drawn(embedded: Path) -> Path:
    """The embedded set, which stands for any set here."""
    return embedded / LAYOUT.folder


def _files(folder: Path) -> dict[str, str]:
    return {name: digest_of(folder / name) for name in LAYOUT.files}


def _train(hosts: Cluster, data: str) -> subprocess.CompletedProcess[str]:
    """One step on a rank of each host; `data` is a folder that is another one on each."""
    words: list[str | Path] = [*launcher(), "--hostfile", hosts.hostfile(*[1] * len(hosts.hosts))]
    words += training(hosts.own / data, hosts.own / f"run-{data}", "--max-steps", "1")
    return hosts[0].run(words, env=variables(hosts[0]), timeout=400)


def test_a_host_without_data_is_sent_it(three_hosts: Cluster, drawn: Path) -> None:
    """node1 has the set, node2 nothing, node3 another one, until it is moved away."""
    folders = [host.files / "data" / LAYOUT.folder for host in three_hosts]
    shutil.copytree(drawn, folders[0])
    shutil.copytree(drawn, folders[2])
    spoilt = folders[2] / LAYOUT.files[2]
    spoilt.write_bytes(bytes([1]) + spoilt.read_bytes()[1:])

    done = _train(three_hosts, "data")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"node3: {three_hosts.own}/data/{LAYOUT.folder}/{LAYOUT.files[2]} is damaged or not rank 0's" in done.stderr
    assert not folders[1].exists()
    assert not (three_hosts[0].files / "run-data").exists()

    folders[2].rename(folders[2].with_name("away"))
    done = _train(three_hosts, "data")
    assert done.returncode == 0, done.stderr
    assert "synthetic sent to node2, node3: 157 MB each, SHA-256 checked" in done.stdout
    for host in (three_hosts[1], three_hosts[2]):
        (received,) = (host.files / "data").glob("received-*")
        assert _files(received) == _files(drawn) and len(list(received.iterdir())) == len(LAYOUT.files)
