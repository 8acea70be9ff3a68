"""What can be said of the image and of compose.yaml without building them; tests/launch/test_image.py does build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvd_cifar.launch.command import parse
from hvd_cifar.launch.install import installer
from hvd_cifar.launch.install.everywhere import files_of
from tests.ranks import CHECKOUT

DEPLOY = CHECKOUT / "deploy"
HOME = "/home/hvd"


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


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


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


def test_two_stages_and_only_the_first_one_builds() -> None:
    before, build, image = _stages()
    assert _of(before, "ARG") == ["BASE=debian:bookworm-slim"]
    assert _of(build, "FROM") == ["${BASE} AS build"]
    assert _of(image, "FROM") == ["${BASE}"]
    assert "ARG" in dict(build) and any("setup ${GPU:+--gpu}" in run for run in _of(build, "RUN"))
    assert not re.search(r"g\+\+|gcc|make\b|pip|setup", " ".join(_of(image, "RUN")))
    assert _of(image, "COPY")[0] == "--from=build /opt/hvd_cifar/.venv /opt/hvd_cifar/.venv"
    assert image.index(("USER", "hvd")) > max(n for n, (word, _) in enumerate(image) if word in ("RUN", "COPY"))
    assert "index" not in str(build) and "PIP_" not in str(build)


def test_set_up_finds_all_that_it_reads_in_the_build_stage(tmp_path: Path) -> None:
    copies = [copy.split() for copy in _of(_stages()[1], "COPY")]
    for *sources, target in copies:
        for source in sources:
            place = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            place.parent.mkdir(parents=True, exist_ok=True)
            one = CHECKOUT / source
            shutil.copytree(one, place) if one.is_dir() else shutil.copy(one, tmp_path / target)
            assert not _ignored(source)
    words = [
        sys.executable,
        "-I",
        str(tmp_path / "hvd_cifar" / "launch" / "install" / "__main__.py"),
        "setup",
        "--nonsense",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unrecognized arguments: --nonsense" in done.stderr  # all is imported, then
    assert installer.fingerprint(tmp_path)  # reads what set-up depends on
    assert (tmp_path / "deploy" / "slim.sh").exists()


def test_what_is_sent_to_the_builder() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/ranks.py", "runs/a/b", "hvd_cifar/__pycache__/a.pyc"):
        assert _ignored(path), path
    for path in ("deploy/id_ed25519", "id_rsa.pub", "deploy/keys/node.pem", ".env", ".netrc"):
        assert _ignored(path), path
    sent = set(_sent())
    package = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "hvd_cifar").rglob("*.py")}
    assert package <= sent
    assert {"run.sh", "setup.cfg", "deploy/entry.sh", "deploy/sshd.conf", "deploy/ssh.conf"} <= sent
    assert {path.partition("/")[0] for path in sent} == {
        "LICENSE",
        "NOTICE",
        "README.md",
        "deploy",
        "examples",
        "hostfiles",
        "hvd_cifar",
        "pyproject.toml",
        "run.sh",
        "setup.cfg",
    }


def test_compose_has_two_nodes_as_the_image_wants_them() -> None:
    file = _compose()
    image = _stages()[2]
    (mount,) = {
        volume for name in ("node1", "node2") for volume in file["services"][name]["volumes"] if ".ssh" in volume
    }
    assert mount == f"keys:{HOME}/.ssh"
    assert file["services"]["keys"]["volumes"] == [mount]
    for name in ("node1", "node2"):
        node = file["services"][name]
        assert node["hostname"] == name
        assert node["shm_size"] == "1gb"
        assert node["cap_add"] == ["SYS_PTRACE"]
        # The image's own choice, for containers without that right, is the other one.
        assert node["environment"] == {"OMPI_MCA_btl_vader_single_copy_mechanism": "cma"}
        for volume in node["volumes"]:
            source, _, place = volume.partition(":")
            assert source in file["volumes"]
            assert any(place in run for run in _of(image, "RUN")), f"{place} is not made for the image's user"
        assert node["image"] == file["services"]["keys"]["image"] == "hvd-cifar"
    assert file["services"]["node2"]["command"] == ["sshd"]
    assert file["services"]["node1"]["depends_on"]["node2"] == {"condition": "service_healthy"}
    assert _of(image, "HEALTHCHECK")
    request = parse(file["services"]["node1"]["command"])
    assert [host.name for host in request.hosts] == ["node1", "node2"]
    assert request.command[0] == "train"


def test_one_port_and_one_user_everywhere() -> None:
    image = _stages()[2]
    sshd, ssh = ((DEPLOY / name).read_text() for name in ("sshd.conf", "ssh.conf"))
    ports = [*_of(image, "EXPOSE"), *re.findall(r"(?m)^\s*Port (\d+)", sshd), *re.findall(r"(?m)^\s*Port (\d+)", ssh)]
    assert ports == ["2222"] * 3
    assert _of(image, "USER") == re.findall(r"(?m)^\s*User (\w+)", ssh) == ["hvd"]
    assert _of(image, "WORKDIR") == [HOME]
    assert "--uid 1000" in " ".join(_of(image, "RUN"))
    assert f"{HOME}/.ssh/" in ssh


def test_the_scripts_and_files_that_the_image_names_are_there() -> None:
    image = " ".join(rest for _, rest in _stages()[2])
    named = set(re.findall(r"/opt/hvd_cifar/(deploy/[\w.]+)", image + (DEPLOY / "entry.sh").read_text()))
    assert named == {"deploy/entry.sh", "deploy/healthcheck.sh", "deploy/sshd.conf"}
    for script in DEPLOY.glob("*.sh"):
        assert script.stat().st_mode & 0o111, f"{script} cannot be run"
    assert all((CHECKOUT / name).exists() for name in named)


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
