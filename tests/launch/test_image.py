"""The image, built and run: what is in it, one container, and the two nodes of deploy/compose.yaml.

Too slow for every run (marked so): `./run.sh test --all`, or `./run.sh test -m slow tests/launch/test_image.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cluster import hosts
from tests.cluster.hosts import Cluster, cluster
from tests.cluster.jobs import losses, wait_for
from tests.launch import image
from tests.launch.image import UID, Container, Machine, builder, own
from tests.ranks import CHECKOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
HOME = "/home/hvd"
MOST_BYTES = 1_450_000_000  # as deploy/containers.md states it, and some room for the next TensorFlow
MOST_BYTES_WITH_CUDA = 6_700_000_000
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|ld|as|clang|make|cmake|nvcc|mpicc|mpicxx)(-[\d.]+)?|cc1(plus)?")
# Four steps, and losses that do not depend on how ranks are spread.
SHORT = ["--dataset", "synthetic", "--max-steps", "4", "--eval-every", "0"]
SHORT += ["--log-every", "1"]
SHORT += ["--global-batch-size", "32", "--precision", "float64", "--threads-per-rank", "1"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if reason := image.reason_to_skip():
        pytest.skip(reason)
    with builder(tmp_path_factory.mktemp("image")) as made:
        yield made


@pytest.fixture(scope="module")
def tag(machine: Machine) -> str:
    begin = time.monotonic()
    built = machine.build()
    print(f"built in {time.monotonic() - begin:.0f} s")
    return built


@pytest.fixture(scope="module")
def alone(machine: Machine, tag: str) -> Container:
    """A container for all tests of one: `docker run hvd-cifar`."""
    return machine.container(tag, "alone")


def test_what_is_in_it(machine: Machine, tag: str, alone: Container) -> None:
    assert machine.inspect(tag)["User"] == "hvd"
    root, size = alone.root, 0
    found: dict[str, list[str]] = {"compilers": [], "keys": [], "settings": [], "others'": []}
    for folder, _, files in os.walk(root):
        for name in files:
            path = Path(folder, name)
            place = str(path.relative_to(root))
            size += path.lstat().st_size
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            if COMPILERS.fullmatch(name) and os.access(path, os.X_OK):
                found["compilers"].append(place)
            if path.stat().st_size < 100_000 and b"PRIVATE KEY-----\n" in path.read_bytes():
                found["keys"].append(place)
            if name == "pip.conf" and path.stat().st_size or place.startswith(("var/lib/apt/lists/", "root/.cache/")):
                found["settings"].append(place)
            if place.startswith("opt/") and path.stat().st_mode & 0o022:
                found["others'"].append(place)
    assert found == {"compilers": [], "keys": [], "settings": [], "others'": []}
    print(f"{size / 1e6:.0f} MB")
    assert size < MOST_BYTES
    assert not list((root / "home/hvd/.ssh").iterdir())
    assert not {".git", "tests", "benchmarks"} & {path.name for path in (root / "opt/hvd_cifar").iterdir()}


def test_it_runs_as_a_user_and_its_environment_is_whole(alone: Container) -> None:
    done = alone.run([], entry=["id"])
    assert done.stdout.startswith(f"uid={UID}(hvd) gid={UID}(hvd) groups={UID}(hvd)"), done.stdout
    # What slim.sh has taken away was not needed: all of the package can be imported, and what it uses now and then.
    program = """
import importlib, pkgutil, hvd_cifar, numpy.testing, matplotlib.pyplot, horovod.runner.launch, tensorboard.program
for module in pkgutil.walk_packages(hvd_cifar.__path__, "hvd_cifar."):
    if not module.name.endswith("__main__") and "guard" not in module.name:
        importlib.import_module(module.name)
import tensorflow as tf
tf.summary.create_file_writer("/tmp/events").close()
"""
    done = alone.run([program], entry=["python", "-c"])
    assert done.returncode == 0, done.stderr
    # All modules are taken from bytecode that is there.
    done = alone.run(["-v", "-c", "import tensorflow, keras, hvd_cifar.training.train"], entry=["python"])
    assert re.findall(r"(?m)^# code object from (/opt/.*)$", done.stderr) == []
    assert done.stderr.count("# code object from '/opt") > 1000
    # run.sh finds it set up, and does not try to do that.
    done = alone.run(["--dry-run", "-np", "2", "train"], entry=["/opt/hvd_cifar/run.sh"])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_wrong_commands_end_with_one_line(alone: Container) -> None:
    for command in (["train", "--model", "nonsense"], ["bake"], ["-np", "x", "train"], ["sshd"]):
        done = alone.run(command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.fixture(scope="module")
def losses_alone(alone: Container) -> list[float]:
    """The losses of two ranks in one container."""
    done = alone.run(["-np", "2", "train", "--model", "tutorial", *SHORT, "--run-dir", "runs/alone"], timeout=900)
    assert done.returncode == 0, done.stderr
    assert "step 4, loss" in done.stdout
    return losses(alone.root / "home/hvd/runs/alone")


def test_two_ranks_train_in_one_container(alone: Container, losses_alone: list[float]) -> None:
    run_dir = alone.root / "home/hvd/runs/alone"
    assert run_dir.stat().st_uid == UID
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert len(losses_alone) == 4


def test_the_image_for_gpus_is_whole_and_computes_without_a_driver(machine: Machine) -> None:
    container = machine.container(machine.build({"GPU": "1"}, tag=f"{image.TAG}:gpu"), "gpus")
    packages = container.root / "opt/hvd_cifar/.venv/lib"
    found = [path for path in packages.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.lstat().st_size for path in container.root.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"{size / 1e6:.0f} MB, of which the environment {sum(path.stat().st_size for path in found) / 1e6:.0f} MB")
    assert size < MOST_BYTES_WITH_CUDA
    names = {path.name for path in found}
    assert {"libcudart.so.12", "libnccl.so.2", "ptxas"} <= names and not any(map(COMPILERS.fullmatch, names - {"nvcc"}))
    check = "/opt/hvd_cifar/hvd_cifar/runtime/check_build.py"
    done = container.run([check, "--gpu"], entry=["python"])
    assert done.returncode == 0, done.stderr
    done = container.run(["-np", "2", "train", "--model", "tutorial", *SHORT, "--run-dir", "runs/gpus"], timeout=900)
    assert done.returncode == 0 and "step 4, loss" in done.stdout, done.stderr
    assert "ranks compute on the CPU: nvidia-smi lists no GPU" in done.stderr


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := hosts.reason_to_skip():
        pytest.skip(reason)
    with cluster(2, tmp_path_factory.mktemp("nodes") / "cluster") as made:
        yield made


@pytest.fixture(scope="module")
def services(machine: Machine, tag: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The services of compose.yaml, each as its settings there and a container with its name, variables and volumes."""
    file = yaml.safe_load((CHECKOUT / "deploy" / "compose.yaml").read_text())
    folder = tmp_path_factory.mktemp("volumes")
    for volume in file["volumes"]:
        (folder / volume).mkdir(mode=0o700)
    own(folder)
    for parent in folder.parents:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)  # pytest's folders are root's alone
    made = {}
    for name, service in file["services"].items():
        places = dict(volume.split(":") for volume in service["volumes"])
        volumes = {folder / volume: place for volume, place in places.items()}
        node = machine.container(tag, name, volumes=volumes, variables=service.get("environment", {}))
        made[name] = {**service, "container": node}
    return made


@pytest.fixture(scope="module")
def node2(two_hosts: Cluster, services: dict[str, Any]) -> Iterator[subprocess.Popen[Any]]:
    """The second node's sshd, as compose.yaml starts it, on the second host."""
    keys = services["keys"]
    done = keys["container"].run(keys["command"], entry=keys["entrypoint"])
    assert done.returncode == 0, done.stderr
    container = services["node2"]["container"]
    assert container.check_health(two_hosts[1]) != 0  # not yet
    log = two_hosts.folder / "node2.log"
    with log.open("wb") as file:
        process = two_hosts[1].start(container.words(services["node2"]["command"]), stdout=file, stderr=file)
    wait_for(lambda: "listening on" in log.read_text() or process.poll() is not None, "sshd", 60)
    assert process.poll() is None, log.read_text()
    yield process
    for left in two_hosts[1].processes():
        left.kill()


def test_the_health_of_a_node(two_hosts: Cluster, services: dict[str, Any], node2: Any) -> None:
    container = services["node2"]["container"]
    assert container.check_health(two_hosts[1]) == 0
    servers = [process for process in _sshds(two_hosts, 1) if "/usr/sbin/sshd" in " ".join(process.cmdline())]
    assert len(servers) == 1
    assert servers[0].uids().real == UID
    servers[0].send_signal(signal.SIGSTOP)
    try:
        assert container.check_health(two_hosts[1]) != 0
    finally:
        servers[0].send_signal(signal.SIGCONT)
    wait_for(lambda: container.check_health(two_hosts[1]) == 0, "health", 60)
    # Somebody else's key: the node does not let it in, and it does not take the node for one of its cluster.
    stranger = two_hosts.folder / "stranger"
    stranger.mkdir()
    key = stranger / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    own(stranger)
    other = Container(container.machine, services["node1"]["container"].id, "node1", container.settings)
    other.volumes = {stranger: f"{HOME}/.ssh"}
    for options, reason in (([], "Host key verification failed"), (["no"], "Permission denied")):
        trust = [f"-oStrictHostKeyChecking={option}" for option in options]
        done = other.run(["-oBatchMode=yes", *trust, "node2", "true"], two_hosts[0], entry=["ssh"])
        assert done.returncode == 255
        assert reason in done.stderr


def test_two_nodes_train_as_one(
    two_hosts: Cluster, services: dict[str, Any], node2: Any, losses_alone: list[float]
) -> None:
    service = services["node1"]
    node = service["container"]
    assert service["command"][1] == "node1:2,node2:2"
    # As in compose.yaml, but for four steps only.
    command = [*service["command"], *SHORT, "--run-dir", "runs/mpi"]
    process = two_hosts[0].start(node.words(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: node.check_health(two_hosts[0]) == 0, "the job's health", 60)
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert output.count("step 4, loss") == 1
    folder = next(path for path in node.volumes if node.volumes[path].endswith("/runs")) / "mpi"
    facts = json.loads((folder / "config.json").read_text())["run"]
    assert facts["hosts"] == ["node1", "node1", "node2", "node2"]
    assert losses(folder) == pytest.approx(losses_alone, rel=1e-12)
    assert node.check_health(two_hosts[0]) != 0  # its job is over
    assert [process.name() for process in two_hosts[1].processes("hvd_cifar train")] == []


def test_the_doctor_is_content(two_hosts: Cluster, services: dict[str, Any], node2: Any) -> None:
    """With one container, and with both nodes: nothing that a run would fail of."""
    node = services["node1"]["container"]
    patient = ["--json", "--probe-timeout", "200", "--job-timeout", "400"]
    for where in (["-np", "2"], ["-H", "node1:1,node2:1"]):
        done = node.run([*where, "doctor", *patient], two_hosts[0], timeout=900)
        assert done.stdout, done.stderr
        findings = json.loads(done.stdout)["findings"]
        wrong = [finding for finding in findings if finding["level"] == "failure"]
        assert (done.returncode, wrong) == (0, []), wrong
        well = {finding["check"] for finding in findings if finding["level"] == "ok"}
        print(where, [finding for finding in findings if finding["level"] != "ok"])
        assert {"shared memory", "job", "versions"} <= well, well


def _sshds(two_hosts: Cluster, index: int) -> list[psutil.Process]:
    """The sshds of a container on a host, whose own sshd is root's."""
    space = os.readlink(f"/proc/{two_hosts[index].pid}/ns/pid")
    all_of_them = [process for process in psutil.process_iter() if process.name() == "sshd"]
    mine = [process for process in all_of_them if process.uids().real == UID]
    return [process for process in mine if os.readlink(f"/proc/{process.pid}/ns/pid") == space]
