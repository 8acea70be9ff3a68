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
from hvd_cifar.launch.install.everywhere import FILES, files_of
from tests.ranks import CHECKOUT

DEPLOY = CHECKOUT / "deploy"


def _stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's instructions, as (WORD, rest), those before the first FROM first, then stage by stage."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (CHECKOUT / "Dockerfile").read_text()).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, " ".join(rest.split())))
    return stages


def _of(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


def _ignored(path: str) -> bool:
    """Whether .dockerignore leaves a file out: a pattern names it or a folder that it is in."""
    lines = (CHECKOUT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    parts = path.split("/")
    folders = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for pattern in patterns:
        tail = pattern.removeprefix("**/")
        if tail != pattern and any(fnmatch(part, tail) for part in parts):
            return True
        if any(fnmatch(folder, pattern) and folder.count("/") == pattern.count("/") for folder in folders):
            return True
    return False


def _sent() -> list[str]:
    """The files of the checkout that belong to it, less those that .dockerignore leaves out."""
    deploy = [f"deploy/{path.name}" for path in (CHECKOUT / "deploy").iterdir()]
    return [path for path in (*files_of(CHECKOUT), *deploy) if not _ignored(path)]


def test_set_up_finds_all_that_it_reads_in_the_build_stage(tmp_path: Path) -> None:
    copies = [copy.split() for copy in _of(_stages()[1], "COPY")]
    for *sources, target in copies:
        for source in sources:
            place = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            place.parent.mkdir(parents=True, exist_ok=True)
            one = CHECKOUT / source
            shutil.copytree(one, place) if one.is_dir() else shutil.copy(one, tmp_path / target)
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
    for name in ("node1", "node2"):
        # The image's own choice, for containers without this right, is the other one.
        assert nodes[name]["cap_add"] == ["SYS_PTRACE"]
        assert nodes[name]["environment"] == {"OMPI_MCA_btl_vader_single_copy_mechanism": "cma"}


def test_what_is_sent_to_the_builder() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/ranks.py", "runs/a/b", "hvd_cifar/__pycache__/a.pyc"):
        assert _ignored(path), path
    for path in ("deploy/id_ed25519", "id_rsa.pub", "deploy/keys/node.pem", ".env", ".netrc"):
        assert _ignored(path), path
    sent = set(_sent())
    package = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "hvd_cifar").rglob("*.py")}
    assert package <= sent
    assert {"run.sh", "setup.cfg", "deploy/entry.sh", "deploy/sshd.conf", "deploy/ssh.conf"} <= sent
    folders = {"deploy", "examples", "hostfiles", "hvd_cifar"}
    assert {path.partition("/")[0] for path in sent} == folders | {*FILES}


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
