"""Set-up on all hosts of a job, with the files, options, Python version and package versions of this checkout.

A host needs an ssh server, the same version of Python, and what set-up needs here: a compiler, make, a package index.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import shlex
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.launch.cluster import ssh
from hvd_cifar.launch.cluster.hosts import Host, is_local
from hvd_cifar.launch.install.steps import say
from hvd_cifar.launch.install.versions import as_constraints, differences, last_line, versions_of

# What is sent of a checkout. Nothing else of its top folder is, since users keep runs, data and keys there.
FOLDERS = ("hvd_cifar", "benchmarks", "examples", "hostfiles")
FILES = ("run.sh", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
SECONDS_TO_ANSWER = 300.0
SENT = ".sent-by-set-up"  # marks a checkout that set-up has sent and may replace
VERSIONS = ".versions"  # in a checkout that is set up from another host: the package versions to install
LOCK = ".set-up.lock"  # in a checkout while it is set up

# Unpacks the files from stdin beside the checkout, and puts them in its place if they differ and set-up may do so. What
# an earlier set-up has sent is removed first, so that files deleted here do not stay there. The mark comes before the
# files, so that another set-up may replace what an interrupted one has sent. Hosts may differ in all files but those
# that are compared. `echo`: what a login shell prints may not end its line.
SEND = """
echo
if [ -e {token} ]; then echo shared; exit; fi
rm -rf {checkout}/.new && mkdir -p {checkout}/.new && cd {checkout} && tar -xf - -C .new || exit 1
[ -e .new/{versions} ] || exit 1
state=same
for name in hvd_cifar run.sh setup.cfg pyproject.toml; do
    diff -r -x __pycache__ .new/$name $name >/dev/null 2>&1 || state=sent
done
if [ $state = sent ]; then
    if [ -e run.sh ] && [ ! -e {sent} ]; then state=other
    else touch {sent} && rm -rf hvd_cifar && cp -Rp .new/. . || exit 1
    fi
fi
[ $state = other ] || cp .new/{versions} .
rm -rf .new
echo $state
"""
SET_UP = """
echo
cd {checkout} || exit 1
for python in {pythons}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != {wanted})' 2>/dev/null; then
        exec env PYTHON="$python" ./run.sh setup --like {checkout}/{versions} {flags}
    fi
done
echo "hvd_cifar: there is no Python {version} like here; install it" >&2
exit 2
"""


class HostFailed(Exception):
    """A host could not be set up. The message is one line."""


@dataclass(frozen=True)
class Here:
    """This checkout and environment, which every host gets.

    python: path of the base interpreter.
    version: of Python, such as (3, 11).
    flags: the options of `setup`.
    files: paths in the checkout, relative to it.
    packages: version by name.
    """

    checkout: Path
    python: str
    version: tuple[int, int]
    flags: tuple[str, ...]
    files: tuple[str, ...]
    packages: dict[str, str]

    def fill(self, script: str, **more: str) -> str:
        """The script with quoted paths filled in."""
        paths = {"checkout": str(self.checkout), "sent": SENT, "versions": VERSIONS}
        return script.format(**{name: shlex.quote(value) for name, value in paths.items()}, **more)

    def set_up_script(self) -> str:
        """The script that sets up a host to which the checkout and the versions were sent."""
        version = ".".join(map(str, self.version))
        pythons = shlex.join([self.python, f"python{version}", "python3"])
        more = {"pythons": pythons, "wanted": str(self.version), "version": version, "flags": shlex.join(self.flags)}
        return self.fill(SET_UP, **more)


def set_up_hosts(hosts: Sequence[Host], here: Here) -> int:
    """Set up all hosts except this one, print a line for each, and return the exit code.

    The hosts get the checkout one after the other, since they may share a disk with each other but not with this one.
    They are set up at the same time. A signal to this process ends all of it.
    """
    others = [host.name for host in hosts if not is_local(host.name)]
    if not others:
        return 0
    say(f"Setting up {len(others)} more host{'s' * (len(others) > 1)}: {', '.join(others)}")
    ready, failed = dict[str, str](), dict[str, str]()
    running: dict[str, _Remote] = {}
    with _token(here.checkout) as token, contextlib.ExitStack() as ended:
        for name in others:
            try:
                if _send(name, here, token):
                    ready[name] = "shares this checkout"
                else:
                    running[name] = ended.enter_context(_Remote(name, here.set_up_script()))
            except HostFailed as failure:
                failed[name] = str(failure)
        for name, remote in running.items():
            try:
                remote.finish()
                ready[name] = _compared(name, here)
            except HostFailed as failure:
                failed[name] = str(failure)
    width = max(map(len, others))
    for name in others:
        say(f"{name:{width}}  {f'FAILED: {failed[name]}' if name in failed else f'ready: {ready[name]}'}")
    return 1 if failed else 0


def _send(name: str, here: Here, token: Path) -> bool:
    """Send a host the files and versions, unless it shares this checkout: return whether it does. Raises HostFailed."""
    script = here.fill(SEND, token=shlex.quote(str(token)))
    state = last_line(_ask(name, script, _packed(here)))
    if state == "other":
        raise HostFailed(f"{here.checkout} there holds other files than here: update it, or move it away")
    if state not in ("shared", "sent", "same"):
        raise HostFailed(f"it answers {state[:80]!r}, which set-up does not know: see what its login shell prints")
    if state == "sent":
        say(f"{name}: has got the checkout ({len(here.files)} files)")
    return state == "shared"


def _compared(name: str, here: Here) -> str:
    """A summary of a host's packages. Raises HostFailed where it has other versions than this one."""
    python = str(here.checkout / ".venv" / "bin" / "python")
    there = versions_of(lambda program: _ask(name, shlex.join([python, "-I", "-c", program])))
    if different := differences(here.packages, there):
        raise HostFailed(f"other versions than here: {', '.join(different)}")
    return f"{len(there)} packages, versions as here"


def _ask(name: str, script: str, stdin: bytes = b"") -> str:
    """The output of a shell script on a host. Raises HostFailed."""
    command = ssh.words(name, ["sh", "-c", script])
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=SECONDS_TO_ANSWER)
    except FileNotFoundError:
        raise HostFailed(ssh.NO_SSH) from None
    except subprocess.TimeoutExpired:
        raise HostFailed(f"no answer within {SECONDS_TO_ANSWER:g} s") from None
    complaint = done.stderr.decode(errors="replace")
    if done.returncode == ssh.FAILED:
        raise HostFailed(ssh.explain(name, complaint))
    if done.returncode:
        lines = complaint.strip().splitlines()
        raise HostFailed(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout.decode(errors="replace")


class _Remote:
    """A shell script that runs on a host. Its output is printed after the host's name."""

    def __init__(self, name: str, script: str) -> None:
        """Start it. It gets a terminal (-tt), so that SIGHUP ends it when the connection breaks."""
        ssh_command, *words = ssh.words(name, ["sh", "-c", script])
        self.name, self.complaint = name, ""
        self.process = subprocess.Popen(
            [ssh_command, "-tt", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.printer = threading.Thread(target=self._print)
        self.printer.start()

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # nothing happens where it has ended
        self.process.wait()

    def finish(self) -> None:
        """Wait for the script's end. Raises HostFailed."""
        self.printer.join()
        _, said = self.process.communicate()
        code = self.process.returncode
        if code == ssh.FAILED:
            raise HostFailed(ssh.explain(self.name, said.decode(errors="replace")))
        if code:
            raise HostFailed(self.complaint or f"exit code {code}")

    def _print(self) -> None:
        assert self.process.stdout
        for whole in io.TextIOWrapper(self.process.stdout, errors="replace", newline="\n"):
            # Set-up draws its steps anew every second on a terminal.
            line = whole.rstrip().rpartition("\r")[2].replace("\033[K", "")
            if line.strip():
                say(f"{self.name}: {line}")
            if line.startswith("hvd_cifar: "):
                self.complaint = line.removeprefix("hvd_cifar: ")


@contextlib.contextmanager
def _token(checkout: Path) -> Iterator[Path]:
    """A new file in the checkout. A host that sees it shares the disk."""
    token = checkout / ".venv" / f".here-{secrets.token_hex(8)}"
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


def _packed(here: Here) -> bytes:
    """The files that a host gets, and the versions of packages, as a tar archive."""
    versions = as_constraints(here.packages).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in here.files:
            archive.add(here.checkout / file, file)
        member = tarfile.TarInfo(VERSIONS)
        member.size = len(versions)
        archive.addfile(member, io.BytesIO(versions))
    return packed.getvalue()
