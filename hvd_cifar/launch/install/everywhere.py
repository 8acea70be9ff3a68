"""Set-up on all hosts of a job: they get this checkout's files and its environment.

A host needs an ssh server, tar, and the same Linux and Python as this one; neither a compiler nor a package index.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster import ssh
from hvd_cifar.launch.cluster.hosts import Host, is_local
from hvd_cifar.launch.install.steps import say

# What is sent beside `.venv`. Nothing else of the checkout's top folder is: users keep runs, data and keys there.
FOLDERS = ("hvd_cifar", "benchmarks", "examples", "hostfiles")
FILES = ("run.sh", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
SECONDS_TO_ANSWER, SECONDS_TO_RECEIVE = 300.0, 3600.0
SENT = ".sent-by-set-up"  # marks a checkout that set-up has sent and may replace; holds the stamp of what was sent
LOCK = ".set-up.lock"  # in a checkout while it is set up

# Packages and their versions.
LISTING = "LC_ALL=C ls .venv/lib/python3*/site-packages | grep -F .dist-info | cksum"
# `echo`: what a login shell prints may not end its line.
ASK = f"""
echo
cd {{checkout}} 2>/dev/null || {{{{ echo none; exit; }}}}
if [ -e {{token}} ]; then echo shared
elif [ "$(cat {{sent}} 2>/dev/null; {LISTING})" = {{stamp}} ]; then echo same
elif [ -e run.sh ] && [ ! -e {{sent}} ]; then echo own
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
TF_CPP_MIN_LOG_LEVEL=2 .venv/bin/python -I hvd_cifar/runtime/check_build.py {gpu} >/dev/null || exit 1
mv .new-{sent} {sent}
"""


@dataclass(frozen=True)
class Here:
    """This checkout and environment, which every host gets."""

    checkout: Path
    python: str  # path of the base interpreter
    gpu: bool  # whether the environment is for GPUs

    def stamp(self) -> str:
        """A hash of the files that hosts get."""
        digest = hashlib.sha256(self.python.encode())
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
    for name in others:
        token = here.checkout / f".here-{secrets.token_hex(8)}"  # a host that sees it shares the disk
        token.touch()
        try:
            say(f"{name:{width}}  ready: {_set_up(name, here, token)}")
        except UserError as failure:
            say(f"{name:{width}}  FAILED: {failure}")
            code = 1
        finally:
            token.unlink(missing_ok=True)
    return code


def _set_up(name: str, here: Here, token: Path) -> str:
    """Set up a host, and return what to say of it. Raises UserError."""
    stamp = here.stamp()
    packages = subprocess.check_output(["sh", "-c", LISTING], cwd=here.checkout, text=True).strip()
    said = _ask(name, here.fill(ASK, token=str(token), stamp=f"{stamp}\n{packages}"))
    state = said.strip().rpartition("\n")[2]  # a login shell prints before it
    if state == "shared":
        return "shares this checkout"
    if state == "own":
        raise UserError(f"{here.checkout} there is not from set-up here: move it away, or set it up there")
    if state not in ("same", "none"):
        raise UserError(f"it answers {state[:80]!r}, which set-up does not know: see what its login shell prints")
    if state == "none":
        say(f"{name}: gets the checkout and its environment")
        _send(name, here, stamp)
    return "files and packages as here"


def _send(name: str, here: Here, stamp: str) -> None:
    """Send a host the files and the environment, and check it there. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SENT).write_text(f"{stamp}\n")
        words = ["tar", "-C", str(here.checkout), "-cf", "-", *files_of(here.checkout), ".venv", "-C", folder, SENT]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as tar:
            try:
                _ask(name, here.fill(RECEIVE), tar.stdout, SECONDS_TO_RECEIVE)
            except UserError:
                tar.kill()
                raise
        if tar.returncode > 1:  # 1: a file changed meanwhile, as by another link to it
            raise UserError(f"tar ended with exit code {tar.returncode}")


def _ask(name: str, script: str, stdin: Any = subprocess.DEVNULL, seconds: float = SECONDS_TO_ANSWER) -> str:
    """The output of a shell script on a host. Raises UserError where it fails, and where the host does not answer."""
    try:
        words = ssh.words(name, ["sh", "-c", script])
        done = subprocess.run(words, stdin=stdin, capture_output=True, timeout=seconds)
    except FileNotFoundError:
        raise UserError(ssh.NO_SSH) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"no answer within {seconds:g} s") from None
    complaint = done.stderr.decode(errors="replace")
    if done.returncode == ssh.FAILED:
        raise UserError(": ".join(ssh.diagnose(name, complaint)))
    if done.returncode:
        raise UserError((complaint.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.decode(errors="replace")


def files_of(checkout: Path) -> tuple[str, ...]:
    """The files of a checkout that hosts get, relative to it."""
    found = [path for folder in FOLDERS for path in (checkout / folder).rglob("*")]
    found += [checkout / name for name in FILES]
    return tuple(
        sorted(str(path.relative_to(checkout)) for path in found if path.is_file() and "__pycache__" not in path.parts)
    )
