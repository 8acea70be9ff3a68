"""The project's image, built from its Dockerfile and run without a container daemon.

    with builder(tmp_path) as machine:
        image = machine.build()
        node = machine.container(image, "node1")
        done = node.run(["-np", "2", "train"])

buildah builds it as it is, on a base that debootstrap makes and that bears the real one's name. A container runs in its
own file system as the image's user, with the image's entry point and variables; its network, name and processes are
those of the host that it is started on, which may be one of tests/cluster/hosts.py.

The Dockerfile uses the public package index. Other settings of this machine's pip and apt are mounted during the build.
The base and Horovod's wheel are kept for the next time, in ~/.cache/hvd_cifar/image-tests.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tests.cluster.hosts import Host
from tests.ranks import CHECKOUT

TOOLS = ("buildah", "debootstrap")
RELEASE = "bookworm"
BASE = f"docker.io/library/debian:{RELEASE}-slim"
TAG = "localhost/hvd-cifar"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hvd_cifar", "image-tests")
UID = 1000
BUILD_SECONDS = 3600
# What buildah says when a container ends with another exit code than 0, and hands that on.
OF_BUILDAH = re.compile(r"(?m)^(subprocess exited with status \d+|Error: exit status \d+)\n|^Error: while running .*\n")
# As the real base: without what only a person at a terminal reads.
LEFT_OUT = ("doc", "groff", "info", "linda", "lintian", "locale", "man")


def reason_to_skip() -> str | None:
    """Why no image can be built here; None: it can."""
    if os.geteuid() != 0:
        return "buildah without a daemon and without root needs more than this test sets up"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"needs {', '.join(missing)} (Debian: apt-get install {' '.join(missing)})" if missing else None


@dataclass
class Container:
    """A container of an image. `settings`: what the image says of how it is run, as Docker has it (Config)."""

    machine: Machine
    id: str
    name: str
    settings: dict[str, Any]
    volumes: Mapping[Path, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, command: Sequence[str], entry: Sequence[str] | None = None) -> list[str]:
        """The command that starts the container on its host. `entry`: replaces the image's entry point."""
        entry = self.settings["Entrypoint"] if entry is None else entry
        options = ["--hostname", self.name, "--isolation", "chroot", "--network", "host"]
        options += [f"--env={name}={value}" for name, value in self.variables.items()]
        options += [f"--volume={folder}:{place}" for folder, place in self.volumes.items()]
        return [*self.machine.buildah, "run", *options, self.id, "--", *entry, *command]

    def run(
        self,
        command: Sequence[str],
        host: Host | None = None,
        entry: Sequence[str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, here or on a host, with its output as text."""
        words = self.words(command, entry)
        if host is not None:
            done = host.run(words, timeout=timeout)
        else:
            done = subprocess.run(words, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        done.stderr = OF_BUILDAH.sub("", done.stderr)
        return done

    def check_health(self, host: Host | None = None) -> int:
        """The exit code of the image's health check."""
        kind, *command = self.settings["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run([], host, entry=command).returncode

    @property
    def root(self) -> Path:
        """The container's file system, as this machine sees it."""
        return Path(self.machine("mount", self.id).strip())


@dataclass
class Machine:
    """buildah with a store of its own in `folder`."""

    folder: Path

    @property
    def buildah(self) -> list[str]:
        """buildah's command, to which its own commands are added."""
        places = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        # The one storage driver that needs nothing of the kernel: each layer is a whole copy.
        return ["buildah", *places, "--storage-driver", "vfs"]

    def __call__(self, *words: str, timeout: float = 600) -> str:
        """The output of a command of buildah's that must succeed."""
        env = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        command = [*self.buildah, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def build(self, arguments: Mapping[str, str] | None = None, tag: str = TAG) -> str:
        """Build the project's image, with build arguments; returns its tag."""
        CACHE.mkdir(parents=True, exist_ok=True)
        self._build_base()
        given = [f"--build-arg={name}={value}" for name, value in (arguments or {}).items()]
        mounts = [f"--volume={mount}" for mount in (*pip_settings(self.folder), f"{CACHE}:/root/.cache")]
        # Docker's format: the other one has no health check.
        options = ["--pull-never", "--network", "host", "--format", "docker", *given, *mounts]
        self("bud", *options, "--tag", tag, str(CHECKOUT), timeout=BUILD_SECONDS)
        return tag

    def inspect(self, tag: str) -> dict[str, Any]:
        """What an image says of how it is run, as Docker has it (Config)."""
        found: dict[str, Any] = json.loads(self("inspect", "--type", "image", tag))["Docker"]["config"]
        return found

    def container(self, tag: str, name: str, **settings: Any) -> Container:
        """A container, not yet started. `settings`: fields of Container."""
        made = self("from", "--pull-never", tag).strip()
        return Container(self, made, name, self.inspect(tag), **settings)

    def _build_base(self) -> None:
        archive = CACHE / f"{RELEASE}.tar"
        if not archive.exists():
            partial = archive.with_suffix(".partial")
            make_base(self.folder / "base", partial)
            partial.rename(archive)
        context = self.folder / "context"
        context.mkdir()
        shutil.copy(archive, context / "base.tar")
        (context / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["bash"]\n')
        self("bud", "--tag", BASE, str(context))
        shutil.rmtree(context)


@contextlib.contextmanager
def builder(folder: Path) -> Iterator[Machine]:
    """buildah with a store in `folder`, which is emptied in the end: layers take gigabytes."""
    machine = Machine(folder)
    try:
        yield machine
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            machine("rm", "--all")
            machine("rmi", "--all", "--force")
        shutil.rmtree(folder, ignore_errors=True)


def make_base(root: Path, archive: Path) -> None:
    """A small Debian, as an archive; `root` is where it is made, and is removed."""
    try:
        _must(["debootstrap", "--variant=minbase", RELEASE, str(root)])
        emptied = [*(f"usr/share/{name}" for name in LEFT_OUT), "var/cache/apt", "var/log", "dev"]
        for place in (root / name for name in emptied):
            for path in place.glob("*"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(root / "var/lib/apt/lists")
        for place in (root / "var/lib/apt/lists/partial", root / "var/cache/apt/archives/partial"):
            place.mkdir(parents=True)
        (root / "etc/resolv.conf").unlink(missing_ok=True)
        excluded = "".join(f"path-exclude /usr/share/{name}/*\n" for name in LEFT_OUT)
        (root / "etc/dpkg/dpkg.cfg.d/docker").write_text(excluded)
        # How apt reaches its mirrors from here.
        for path in Path("/etc/apt/apt.conf.d").glob("*"):
            if "Acquire" in path.read_text():
                shutil.copy(path, root / "etc/apt/apt.conf.d")
        _must(["tar", "--directory", str(root), "--create", "--file", str(archive), "."])
    finally:
        shutil.rmtree(root, ignore_errors=True)


def pip_settings(folder: Path) -> list[str]:
    """Mounts for buildah that give this machine's settings of pip, from files and variables, to pip in a build."""
    listed = subprocess.check_output(["python3", "-m", "pip", "config", "list"], text=True)
    given: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            given[option] = str(ast.literal_eval(value))
    mounts = []
    for option in {"cert", "constraint"} & set(given):
        # Not where it lies: installing Debian's certificates writes there.
        mounts.append(f"{Path(given[option]).resolve()}:/mnt/pip-{option}:ro")
        given[option] = f"/mnt/pip-{option}"
    for option, value in given.items():
        for word in value.split() if option in ("find-links", "index-url", "extra-index-url") else []:
            local = urlparse(word).path if word.startswith("file:") else word
            if local.startswith("/"):
                # The pages of an index lead to files beside it.
                place = Path(local) if option == "find-links" else Path(local).parent
                mounts.append(f"{place}:{place}:ro")
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{option} = {value}\n" for option, value in given.items()))
    return [f"{file}:/etc/pip.conf:ro", *dict.fromkeys(mounts)]


def own(folder: Path) -> Path:
    """Give a folder and all in it to the image's user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID)
    return folder


def _must(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
