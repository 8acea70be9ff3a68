"""Set-up on every host: what is sent, and the report on each host. It needs no package index."""

from __future__ import annotations

import json
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
    options = {"gpu": False, "test": True}
    record = {"complete": True, "options": options, "python": python, "fingerprint": found.stdout.strip()}
    (venv / installer.RECORD).write_text(json.dumps(record))


@pytest.fixture(scope="module")
def prepared(three_hosts: Cluster) -> Iterator[Cluster]:
    """node1 is set up; node2 has nothing; node3 has a checkout of its own.

    node1 also has what users put beside the code: a hostfile, keys. No host has a package index.
    """
    _checkout(mine := three_hosts[0].files / "checkout")
    _environment(three_hosts[0], three_hosts.own)
    _checkout(three_hosts[2].files / "checkout")
    (mine / "my-cluster").write_text("node2 slots=1\n")
    (mine / "keys").mkdir()
    for secret in ("keys/id_ed25519", "id_rsa"):
        (mine / secret).write_text("secret\n")
    yield three_hosts


def test_hosts_get_the_checkout_and_its_environment(prepared: Cluster) -> None:
    first, second, third = prepared
    run_sh = prepared.own / "checkout" / "run.sh"
    sent, theirs = second.files / "checkout", third.files / "checkout"

    def set_up(code: int) -> tuple[str, dict[str, str]]:
        """All that it says, and its last words on each host."""
        done = first.run([run_sh, "setup", "--hostfile", prepared.hostfile(1, 1, 1)], env=variables(first), timeout=400)
        assert done.returncode == code, done.stderr
        return done.stderr, dict(line.split("  ", 1) for line in done.stderr.splitlines()[-3:] if "  " in line)

    said, report = set_up(1)
    assert report["node2"].startswith("ready: ") and "packages as here" in report["node2"], said
    assert "FAILED" in report["node3"] and "move it away" in report["node3"]
    assert "Nothing to do" in said.partition("node2")[0]
    assert all((sent / name).read_bytes() == (CHECKOUT / name).read_bytes() for name in everywhere.files_of(CHECKOUT))
    assert not [path for path in sent.rglob("*") if path.name in ("id_ed25519", "id_rsa", "my-cluster")]
    assert (theirs / "run.sh").exists() and not (theirs / ".venv").exists()
    # It is the environment of that host's launcher.
    done = second.run([run_sh, "--dry-run", "train", "--dataset", "synthetic"], env=variables(second), timeout=400)
    assert done.returncode == 0 and "Setting up" not in done.stderr, done.stderr

    # A host with another package gets all again, and what is gone here goes there. Another host lacks this Python.
    package = next(sent.glob(".venv/lib/python3*/site-packages/numpy-*.dist-info"))
    package.rename(package.with_name("numpy-0.1.dist-info"))
    (sent / "hvd_cifar" / "gone.py").touch()
    shutil.rmtree(theirs)
    python = Path(sys.executable).resolve()
    third.must("mount", "--bind", "/dev/null", python)
    said, report = set_up(1)
    assert "node2: gets the checkout" in said and not (sent / "hvd_cifar" / "gone.py").exists()
    assert report["node3"].startswith("FAILED: no such Python as here, ")

    # Nothing is sent to hosts that have all, or share the disk.
    third.must("umount", python)
    third.must("mount", "--bind", first.files / "checkout", prepared.own / "checkout")
    said, report = set_up(0)
    assert "gets" not in said and report["node3"] == "ready: shares this checkout"
