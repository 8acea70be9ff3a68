"""The MPIJob: right by the operator's schema, and its launcher's command run for real on two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from benchmarks import runs
from tests.cluster import jobs
from tests.cluster.hosts import Cluster, cluster, reason_to_skip
from tests.ranks import CHECKOUT, wait_for

JOB = yaml.safe_load((CHECKOUT / "deploy" / "mpijob.yaml").read_text())
SCHEMA = json.loads(Path(__file__).with_name("mpijob-v2beta1.json").read_text())
WAIT = CHECKOUT / "deploy" / "wait-for-hosts.sh"
IN_IMAGE = "/opt/hvd_cifar"
REPLICAS = JOB["spec"]["mpiReplicaSpecs"]
LAUNCHER, WORKER = (REPLICAS[kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))


def test_the_job_is_right_by_the_schema() -> None:
    jsonschema.validate(JOB, SCHEMA)


def test_what_the_schema_leaves_to_the_operator() -> None:
    """What it does to pods: it adds an sshd of its own where a worker has no command."""
    assert WORKER["args"] == ["sshd"]
    for spec in REPLICAS.values():
        pod = spec["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 1000  # the image's user, whose home the keys are in
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


NAMES = [f"hvd-cifar-{pod}.hvd-cifar.default.svc" for pod in ("launcher", "worker-0")]
# What the operator sets for the launcher of an Open MPI job.
VARIABLES = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "1",
}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts with pods' names; the first does not know the second one's."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with cluster(2, tmp_path_factory.mktemp("pods") / "cluster") as made:
        for host, name in zip(made, NAMES, strict=True):
            host.must("hostname", name.partition(".")[0])
        for host in made:
            known = host.files / "known_hosts"
            keys = known.read_text().splitlines()
            known.write_text("".join(f"{name},{key}\n" for name, key in zip(NAMES, keys, strict=True)))
        yield made


def _names(pods: Cluster, count: int) -> str:
    lines = [f"{host.address} {name} {name.partition('.')[0]}\n" for host, name in zip(pods, NAMES, strict=True)]
    return "127.0.0.1 localhost\n" + "".join(lines[:count])


def _hostfile(pods: Cluster) -> Path:
    path = pods.folder / "hostfile"
    path.write_text("".join(f"{name} slots=1\n" for name in NAMES))
    return path


def test_the_launcher_waits_for_names_and_then_trains(pods: Cluster, embedded: Path, tmp_path: Path) -> None:
    run_dir, hostfile, errors = tmp_path / "run", _hostfile(pods), tmp_path / "stderr"
    words = LAUNCHER["command"] + LAUNCHER["args"]
    assert words[:2] == ["/usr/bin/tini", "--"]
    place = {"/etc/mpi/hostfile": str(hostfile), "python": sys.executable}
    words = [place.get(word, word.replace(IN_IMAGE, str(CHECKOUT))) for word in words[2:]]
    words += jobs.training(embedded, run_dir)[1:]
    first = pods[0]
    env = jobs.variables(first) | VARIABLES | {"OMPI_MCA_orte_default_hostfile": str(hostfile)}
    pods.set_names(pods[1], _names(pods, 2))
    pods.set_names(first, _names(pods, 1))
    with errors.open("wb") as file:
        job = first.start(words, env=env, stdout=subprocess.PIPE, stderr=file)
    wait_for(lambda: b"waiting for" in errors.read_bytes(), "the script to wait", job=job)
    time.sleep(1.5)
    assert job.poll() is None, errors.read_text()
    pods.set_names(first, _names(pods, 2))
    printed = job.communicate(timeout=200)[0].decode()
    assert job.returncode == 0, printed + errors.read_text()
    assert errors.read_text() == f"waiting for {NAMES[1]}: its name does not resolve\n"
    facts = jobs.recorded(run_dir)
    assert facts["hosts"] == [name.partition(".")[0] for name in NAMES]
    assert len(runs.losses(run_dir)) == 4
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 2


def test_the_wait_has_an_end(pods: Cluster) -> None:
    pods.set_names(pods[0], _names(pods, 1))
    done = pods[0].run([WAIT, "-t", "1", _hostfile(pods), "echo", "started"])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"hvd_cifar: {NAMES[1]} cannot be reached after 1 s: its name does not resolve" in done.stderr
