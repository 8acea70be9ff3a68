"""What can be said of the image and of compose.yaml without building them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from hvd_cifar.launch.command import parse
from hvd_cifar.launch.install import installer
from hvd_cifar.launch.install.everywhere import files_of
from tests.ranks import CHECKOUT

DEPLOY = CHECKOUT / "deploy"


def _ignored(path: str) -> bool:
    """Whether .dockerignore leaves a file out: a pattern names it or a folder that it is in."""
    lines = (CHECKOUT / ".dockerignore").read_text().splitlines()
    parts = path.split("/")
    folders = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for pattern in (line for line in lines if line and not line.startswith("#")):
        anywhere = pattern.removeprefix("**/")
        if any(fnmatch(one, anywhere) for one in (folders if anywhere == pattern else parts)):
            return True
    return False


def test_set_up_finds_all_that_it_reads_in_the_build_stage(tmp_path: Path) -> None:
    text = (CHECKOUT / "Dockerfile").read_text()
    for *sources, target in map(str.split, re.findall(r"(?m)^COPY (?!\.|--)(.+)$", text.partition(" AS build")[2])):
        for source in sources if not target.startswith("/") else ():
            place = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            place.parent.mkdir(parents=True, exist_ok=True)
            one = CHECKOUT / source
            shutil.copytree(one, place) if one.is_dir() else shutil.copy(one, place)
            assert not _ignored(source)
    program = str(tmp_path / "hvd_cifar" / "launch" / "install" / "__main__.py")
    done = subprocess.run([sys.executable, "-I", program, "setup", "--nonsense"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unrecognized arguments: --nonsense" in done.stderr  # all is imported, then
    assert installer.fingerprint(tmp_path)  # reads what set-up depends on
    assert (tmp_path / "deploy" / "slim.sh").exists()


def test_compose_starts_a_training_on_two_nodes() -> None:
    nodes = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    request = parse(nodes["node1"]["command"])
    assert [host.name for host in request.hosts] == ["node1", "node2"] and request.command[0] == "train"


def test_what_is_sent_to_the_builder() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/ranks.py", "docs/faq.md", "runs/a/b", "a/__pycache__/a.pyc"):
        assert _ignored(path), path
    for path in ("deploy/id_ed25519", "id_rsa.pub", "deploy/keys/node.pem", ".env", ".netrc"):
        assert _ignored(path), path
    for path in (*files_of(CHECKOUT), "deploy/entry.sh", "deploy/sshd.conf", "deploy/ssh.conf"):
        assert not _ignored(path) or path.startswith("benchmarks/"), path


@pytest.mark.skipif(not shutil.which("sshd", path="/usr/sbin:/usr/bin"), reason="needs sshd")
def test_sshd_and_ssh_read_their_files(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    sshd = str(shutil.which("sshd", path="/usr/sbin:/usr/bin"))
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where sshd has never run, and then it asks for it
    words = [sshd, "-T", "-f", str(DEPLOY / "sshd.conf"), "-h", str(key)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert {"port 2222", "usepam no", "passwordauthentication no", "kbdinteractiveauthentication no"} <= set(said)
    words = ["ssh", "-G", "-F", str(DEPLOY / "ssh.conf"), "node2"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"port 2222", "user hvd", "stricthostkeychecking true"} <= set(said)


def test_a_node_without_a_key_says_what_to_mount(tmp_path: Path) -> None:
    words = ["sh", str(DEPLOY / "entry.sh"), "sshd"]
    done = subprocess.run(words, capture_output=True, text=True, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"in {tmp_path}/.ssh; mount a folder with id_ed25519" in done.stderr
