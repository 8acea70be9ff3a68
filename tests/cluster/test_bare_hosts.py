"""The commands of docs/cluster.md, as they stand there, on hosts with nothing but Python, a compiler, make and sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_cifar.launch.install import cache, everywhere, installer
from hvd_cifar.launch.install.versions import environment_in
from tests.cluster.hosts import Cluster
from tests.cluster.jobs import losses, recorded
from tests.ranks import CHECKOUT

pytestmark = pytest.mark.slow
OWN = ("horovod", "hvd-cifar")  # built here, and no package of an index


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of this environment as files: hosts have no way to a package index."""
    folder = tmp_path_factory.mktemp("packages")
    found = {name: version for name, version in environment_in(installer.VENV).packages.items() if name not in OWN}
    names = [f"{name}=={version}" for name, version in found.items()]
    pip = [sys.executable, "-I", "-m", "pip"]
    done = subprocess.run([*pip, "download", "-q", "--no-deps", "-d", str(folder), *names], capture_output=True)
    if done.returncode:
        pytest.skip(f"needs a package index: {done.stderr.decode().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def bare(three_hosts: Cluster, packages: Path) -> Iterator[Cluster]:
    """Three hosts, the first of them with a checkout. They share a disk for packages and wheels, and nothing else."""
    _copy_checkout(three_hosts[0].files / "checkout")
    settings = " ".join(f"{name}={value}" for name, value in _package_settings(packages).items())
    for host in three_hosts:
        config = host.files / "ssh" / "sshd_config"
        config.write_text(f"{config.read_text()}SetEnv {settings}\n")
        os.kill(host.pid, 1)  # sshd reads its settings again
    yield three_hosts


def _copy_checkout(folder: Path) -> None:
    for name in everywhere.files_of(CHECKOUT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / name)


def _package_settings(packages: Path) -> dict[str, str]:
    """For pip, and where wheels of Horovod are kept: the user's own place, so that it is built once."""
    wheels = cache.cache_folder(os.environ, CHECKOUT / ".venv" / "wheels")
    of_user = str(wheels.parents[1]) if wheels.parent.name == "hvd_cifar" else ""
    found = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages), "PIP_CONFIG_FILE": "/dev/null"}
    return found | ({"XDG_CACHE_HOME": of_user} if of_user else {})


def commands() -> list[str]:
    """The lines of the page's examples that are commands, in their order."""
    lines = (CHECKOUT / "docs" / "cluster.md").read_text().split("```\n")[1::2]
    return [line for block in lines for line in block.splitlines() if line.startswith(("./run.sh ", "cp "))]


@pytest.mark.timeout(3600)
def test_the_five_steps(bare: Cluster, packages: Path) -> None:
    first, second, third = bare
    checkout = first.files / "checkout"
    user = {**first.environment(), **_package_settings(packages), "TF_CPP_MIN_LOG_LEVEL": "2"}
    said: dict[str, subprocess.CompletedProcess[str]] = {}
    for command in commands():
        done = first.run(["sh", "-c", f"cd checkout && {command}"], env=user, timeout=2400)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[command] = done
        if command.startswith("cp "):
            (checkout / "my-cluster").write_text("node1 slots=1\nnode2 slots=1\nnode3 slots=1\n")

    set_up = next(done.stderr for command, done in said.items() if " setup " in command)
    report = dict(line.split("  ", 1) for line in set_up.splitlines() if line.startswith("node") and "  " in line)
    assert all("ready: " in report[name] and "versions as here" in report[name] for name in ("node2", "node3"))
    for host in (second, third):
        assert (host.files / "checkout" / ".venv" / "bin" / "mpirun").exists()
        assert (host.files / "checkout" / "hvd_cifar" / "cli.py").exists()

    runs = {name: checkout / "runs" / name for name in ("cluster", "ring")}
    for run_dir in runs.values():
        assert recorded(run_dir)["hosts"] == ["node1", "node2", "node3"]
        assert len(losses(run_dir)) == 2  # of 20 steps, a line every 10
    assert {name: recorded(run_dir)["algorithm"] for name, run_dir in runs.items()} == {
        "cluster": "ring",
        "ring": "ring",
    }
    measured = next(done.stdout for command, done in said.items() if "benchmark allreduce" in command)
    assert "(ring; TCP (10.77.0.0/24) and shared memory)" in measured

    done = first.run(["sh", "-c", "cd checkout && ./run.sh setup --hostfile my-cluster"], env=user, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Nothing to do") == 1 and done.stderr.count("ready: ") == 2
