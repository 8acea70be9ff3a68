"""Set-up on every host: files and options that are sent, and the report on each host. It needs no package index."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_cifar.launch.install import everywhere, installer
from tests.cluster.hosts import Cluster, Host
from tests.cluster.jobs import variables
from tests.ranks import CHECKOUT


def _checkout(folder: Path) -> None:
    for name in everywhere.files_of(CHECKOUT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / name)


def _environment(host: Host, own: Path) -> None:
    """An environment in the host's checkout that is set up to all appearances: links to this one's packages."""
    real, venv = Path(sys.executable).parents[1], host.files / "checkout" / ".venv"
    packages = Path(sysconfig.get_path("purelib")).relative_to(real)
    (venv / packages).mkdir(parents=True)
    for folder in (Path(), *reversed(packages.parents[:-1]), packages):
        for entry in (real / folder).iterdir():
            if not (venv / folder / entry.name).exists() and entry.name != installer.RECORD:
                (venv / folder / entry.name).symlink_to(entry)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # The checkout's place, as the host sees it, is part of the fingerprint.
    code = f"from hvd_cifar.launch.install import installer; print(installer.fingerprint(python='{python}'))"
    found = host.run([sys.executable, "-c", code], env={**variables(host), "PYTHONPATH": str(own / "checkout")})
    options = {"gpu": False, "system_mpi": False, "test": True}
    record = {"complete": True, "options": options, "python": python, "fingerprint": found.stdout.strip()}
    (venv / installer.RECORD).write_text(json.dumps(record))


@pytest.fixture(scope="module")
def prepared(four_hosts: Cluster) -> Iterator[Cluster]:
    """node1 is set up; node2 has nothing; node3 is as node1, but for what is no code; node4 has other code.

    node1 also has what users put beside the code: a hostfile, keys.
    """
    own = four_hosts.own
    for number in (0, 2):
        _checkout(four_hosts[number].files / "checkout")
        _environment(four_hosts[number], own)
    _checkout(four_hosts[3].files / "checkout")
    (four_hosts[3].files / "checkout" / "setup.cfg").write_text("another\n")
    mine = four_hosts[0].files / "checkout"
    (mine / "my-cluster").write_text("node2 slots=1\n")
    (mine / "keys").mkdir()
    for secret in ("keys/id_ed25519", "id_rsa"):
        (mine / secret).write_text("secret\n")
    (four_hosts[2].files / "checkout" / "README.md").write_text("another\n")
    yield four_hosts


def test_every_host_is_reported(prepared: Cluster) -> None:
    first, second, third, _ = prepared
    for host in (second, third):
        (host.files / "ssh" / "sshd_config").write_text(
            (host.files / "ssh" / "sshd_config").read_text() + "SetEnv PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null\n"
        )
        os.kill(host.pid, 1)  # sshd reads its settings again
    run_sh = prepared.own / "checkout" / "run.sh"
    done = first.run([run_sh, "setup", "--hostfile", prepared.hostfile(1, 1, 1, 1)], env=variables(first), timeout=400)
    assert done.returncode == 1, done.stderr
    report = dict(line.split("  ", 1) for line in done.stderr.splitlines()[-3:])
    assert "ready: " in report["node3"] and "versions as here" in report["node3"]
    assert "FAILED: set-up failed" in report["node2"]
    assert "FAILED" in report["node4"] and "holds other files than here" in report["node4"]
    assert "Nothing to do" in done.stderr.partition("Setting up 3 more hosts")[0]

    # The host without anything got the code, and these versions to install.
    sent = second.files / "checkout"
    assert all((sent / name).read_bytes() == (CHECKOUT / name).read_bytes() for name in everywhere.files_of(CHECKOUT))
    versions = (sent / everywhere.VERSIONS).read_text()
    assert "numpy==" in versions and "horovod==" not in versions
    assert "--constraint" in (sent / ".venv" / "set-up.log").read_text()
    assert not [path for path in sent.rglob("*") if path.name in ("id_ed25519", "id_rsa")]

    # A file that no longer exists here is removed there: an additional file alone has the checkout sent again.
    gone = sent / "hvd_cifar" / "launch" / "gone.py"
    gone.touch()
    first.run([run_sh, "setup", "-H", "node1:1,node2:1"], env=variables(first), timeout=400)
    assert not gone.exists()
    assert (sent / "hvd_cifar" / "cli.py").read_bytes() == (CHECKOUT / "hvd_cifar" / "cli.py").read_bytes()


def test_options_of_this_host_are_those_of_all(prepared: Cluster) -> None:
    """This host is set up with --gpu, the other for the CPU; without named options that one looks at its driver."""
    first, _, third, _ = prepared
    files = [host.files / "checkout" / ".venv" / installer.RECORD for host in (first, third)]
    before = [file.read_text() for file in files]
    record = json.loads(before[0])
    files[0].write_text(json.dumps(record | {"options": record["options"] | {"gpu": True}}))
    settings = third.files / "ssh" / "sshd_config"
    old_settings = settings.read_text()
    # Of several such lines sshd takes the first.
    settings.write_text(f"SetEnv PATH={prepared.own}/bin:/usr/bin:/bin PIP_NO_INDEX=1\n" + old_settings)
    (third.files / "bin").mkdir(exist_ok=True)
    (third.files / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 470.256.02, 8.0, NVIDIA A100\n")
    (third.files / "bin" / "nvidia-smi").chmod(0o755)
    os.kill(third.pid, 1)  # sshd reads its settings again
    run_sh = prepared.own / "checkout" / "run.sh"
    done = first.run([run_sh, "setup", "-H", "node1:1,node3:1"], env=variables(first), timeout=400)
    files[0].write_text(before[0])
    settings.write_text(old_settings)
    os.kill(third.pid, 1)
    assert done.returncode == 1
    assert "is set up (--gpu --packaged-mpi --test)" in done.stderr
    assert "node3  FAILED: --gpu: driver 470.256.02, NVIDIA A100 (8.0); training on GPUs needs" in done.stderr
    assert files[1].read_text() == before[1]


def test_other_versions_are_not_taken_for_set_up(prepared: Cluster) -> None:
    first, _, third, _ = prepared
    venv = third.files / "checkout" / ".venv"
    info = next(venv.glob("lib/python3*/site-packages/rich-*.dist-info"))
    text = (info / "METADATA").read_text()
    info.unlink()  # a link to the real one
    info.mkdir()
    (info / "METADATA").write_text(text.replace("\nVersion: ", "\nVersion: 1", 1))
    run_sh = prepared.own / "checkout" / "run.sh"
    words = [str(run_sh), "setup", "-H", "node1:1,node3:1"]
    done = first.run(words, env=variables(first), timeout=400)  # node3's pip is the real environment's
    assert done.returncode == 1
    assert "node3  FAILED" in done.stderr and "jobs elsewhere may use it" in done.stderr
    assert venv.exists()
    done = first.run([*words, "--replace"], env=variables(first), timeout=400)
    assert done.returncode == 1
    assert "node3: Setting up" in done.stderr and "FAILED: set-up failed" in done.stderr.splitlines()[-1]
