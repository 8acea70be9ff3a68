"""Set-up on all hosts of a job: they get this checkout's files and its environment.

A host needs an ssh server, tar, and the same Linux and Python as this one; neither a compiler nor a package index.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster import ssh
from hvd_cifar.launch.cluster.hosts import Host, is_local
from hvd_cifar.launch.install.packages import differences, last_line, versions_of
from hvd_cifar.launch.install.steps import say

# What is sent beside `.venv`. Nothing else of the checkout's top folder is: users keep runs, data and keys there.
FOLDERS = ("hvd_cifar", "benchmarks", "examples", "hostfiles")
FILES = ("run.sh", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
SECONDS_TO_ANSWER, SECONDS_TO_RECEIVE = 300.0, 3600.0
SENT = ".sent-by-set-up"  # marks a checkout that set-up has sent and may replace; holds the stamp of what was sent
LOCK = ".set-up.lock"  # in a checkout while it is set up

# `echo`: what a login shell prints may not end its line.
ASK = """
echo
cd {checkout} 2>/dev/null || {{ echo none; exit; }}
if [ -e {token} ]; then echo shared
elif [ "$(cat {sent} 2>/dev/null)" = {stamp} ]; then echo same
elif [ -e run.sh ] && [ ! -e {sent} ]; then echo own
else echo none; fi
"""
# Unpacks stdin beside the checkout, and puts it in its place; the mark comes first, so that another set-up may replace
# what an interrupted one has sent, and its text last. What an earlier set-up has sent is removed.
RECEIVE = """
echo
mkdir -p {checkout} && cd {checkout} && rm -rf .new && mkdir .new && : > {sent} || exit 1
tar -xf - -C .new && [ -e .new/{sent} ] && mv .new/{sent} .new-{sent} || exit 1
rm -rf hvd_cifar .venv && mv .new/hvd_cifar .new/.venv . && cp -Rp .new/. . && rm -rf .new || exit 1
.venv/bin/python -I -c '' 2>/dev/null || {{ echo "no such Python as here, {python}: install it" >&2; exit 1; }}
[ -z "{gpu}" ] || .venv/bin/python -I -m hvd_cifar.launch.install.machine || exit 1
TF_CPP_MIN_LOG_LEVEL=2 .venv/bin/python -I hvd_cifar/runtime/check_build.py {gpu} >/dev/null || exit 1
mv .new-{sent} {sent}
"""


@dataclass(frozen=True)
class Here:
    """This checkout and environment, which every host gets.

    python: path of the base interpreter.
    gpu: whether the environment is for GPUs.
    packages: version by name.
    """

    checkout: Path
    python: str
    gpu: bool
    packages: Mapping[str, str]

    def stamp(self) -> str:
        """A hash of what hosts get."""
        digest = hashlib.sha256(repr((self.python, sorted(self.packages.items()))).encode())
        for file in (*files_of(self.checkout), ".venv/set-up.json"):
            digest.update(file.encode() + (self.checkout / file).read_bytes())
        return digest.hexdigest()

    def fill(self, script: str, **more: str) -> str:
        """The script with quoted words filled in."""
        words = {"checkout": str(self.checkout), "sent": SENT, "python": self.python, **more}
        return script.format(gpu="--gpu" * self.gpu, **{name: shlex.quote(word) for name, word in words.items()})


def set_up_hosts(hosts: Sequence[Host], here: Here) -> int:
    """Set up all hosts except this one, print a line for each, and return the exit code.

    One after the other, since they may share a disk with each other but not with this one.
    """
    others = [host.name for host in hosts if not is_local(host.name)]
    width, code = max(map(len, others), default=0), 0
    with _token(here.checkout) as token:
        for name in others:
            try:
                say(f"{name:{width}}  ready: {_set_up(name, here, token)}")
            except UserError as failure:
                say(f"{name:{width}}  FAILED: {failure}")
                code = 1
    return code


def _set_up(name: str, here: Here, token: Path) -> str:
    """Set up a host, and return what to say of it. Raises UserError."""
    stamp = here.stamp()
    state = last_line(_ask(name, here.fill(ASK, token=str(token), stamp=stamp)))
    if state == "shared":
        return "shares this checkout"
    if state == "own":
        raise UserError(f"{here.checkout} there is not from set-up here: move it away, or set it up there")
    if state not in ("same", "none"):
        raise UserError(f"it answers {state[:80]!r}, which set-up does not know: see what its login shell prints")
    if state == "none" or _differences(name, here):
        say(f"{name}: gets the checkout and its environment")
        _send(name, here, stamp)
    return f"{len(here.packages)} packages, versions as here"


def _send(name: str, here: Here, stamp: str) -> None:
    """Send a host the files and the environment, and check it there. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SENT).write_text(stamp)
        words = ["tar", "-C", str(here.checkout), "-cf", "-", *files_of(here.checkout), ".venv", "-C", folder, SENT]
        complaints = Path(folder, "complaints")
        with complaints.open("w") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file) as tar:
            try:
                _ask(name, here.fill(RECEIVE), tar.stdout, SECONDS_TO_RECEIVE)
            except UserError:
                tar.kill()
                raise
        if tar.returncode > 1:  # 1: a file changed meanwhile, as by another link to it
            raise UserError((complaints.read_text().strip().splitlines() or ["tar failed"])[-1])


def _differences(name: str, here: Here) -> list[str]:
    """Packages of a host of other versions than here. Raises UserError."""
    python = str(here.checkout / ".venv" / "bin" / "python")
    return differences(here.packages, versions_of(lambda text: _ask(name, shlex.join([python, "-I", "-c", text]))))


def _ask(name: str, script: str, stdin: Any = subprocess.DEVNULL, seconds: float = SECONDS_TO_ANSWER) -> str:
    """The output of a shell script on a host. Raises UserError."""
    return ssh.ask(name, ["sh", "-c", script], seconds, stdin)


@contextlib.contextmanager
def _token(checkout: Path) -> Iterator[Path]:
    """A new file in the checkout. A host that sees it shares the disk."""
    token = checkout / f".here-{secrets.token_hex(8)}"
    token.touch()
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def files_of(checkout: Path) -> tuple[str, ...]:
    """The files of a checkout that hosts get, relative to it."""
    found = [path for folder in FOLDERS for path in (checkout / folder).rglob("*")]
    found += [checkout / name for name in FILES]
    return tuple(
        sorted(str(path.relative_to(checkout)) for path in found if path.is_file() and "__pycache__" not in path.parts)
    )
