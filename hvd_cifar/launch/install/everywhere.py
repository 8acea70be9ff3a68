"""Set-up on all hosts of a job, with the files, options, Python version and package versions of this checkout.

A host needs an ssh server, the same version of Python, and what set-up needs here: a compiler, make, a package index.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shlex
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.launch.cluster import ssh
from hvd_cifar.launch.cluster.hosts import Host, is_local
from hvd_cifar.launch.install.steps import say
from hvd_cifar.launch.install.versions import as_constraints, differences, last_line, versions_of

# Folders in the checkout's top folder that hold no code.
LEFT_OUT = {".git", ".venv", "runs", "data", "keys"}
# containers.md has users make a cluster's keys in the checkout.
SECRET = re.compile(r"id_[a-z0-9]+|id_(rsa|dsa|ecdsa|ed25519)[\w.-]*|.*_key|.*\.(pem|key)")
PACKAGE = "hvd_cifar/"
# The files beside the package on which a run depends. Hosts may differ in all others.
COMPARED = ("run.sh", "setup.cfg", "pyproject.toml")
SECONDS_TO_ANSWER = 300.0
CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache"}
SENT = ".sent-by-set-up"  # marks a checkout that set-up has sent and may replace
VERSIONS = ".versions"  # in a checkout that is set up from another host: the package versions to install
LOCK = ".set-up.lock"  # in a checkout while it is set up

# `echo`: what a login shell prints may not end its line.
LOOK = """
echo
if [ -e {token} ]; then echo shared
elif [ ! -e {checkout}/run.sh ]; then echo absent
elif cd {checkout} && sha256sum --status --check - &&
    [ "$(find hvd_cifar -name '*.py' | LC_ALL=C sort | sha256sum)" = "{names}  -" ]; then echo same
elif [ -e {checkout}/{sent} ]; then echo sent
else echo other; fi
"""
# Removes a package that was sent before, so that files deleted here do not stay there. Marks the checkout first, so
# that another set-up may replace what an interrupted one has sent.
UNPACK = """
mkdir -p {checkout} && cd {checkout} || exit 1
if [ -e {sent} ]; then rm -rf hvd_cifar; fi
touch {sent} && tar -xf -
"""
NOTE = "cat > {checkout}/{versions}"
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


# Hosts may share a disk with each other but not with this one: each finds what was sent to one before.
_sends = threading.Lock()


# The ssh processes of all hosts' threads, which a signal to this process ends.
_remote: set[subprocess.Popen[bytes]] = set()
_is_over = threading.Event()  # no thread starts another one


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


def set_up_hosts(hosts: Sequence[Host], here: Here) -> int:
    """Set up all hosts except this one, print a line for each, and return the exit code."""
    others = [host.name for host in hosts if not is_local(host.name)]
    if not others:
        return 0
    _is_over.clear()
    say(f"Setting up {len(others)} more host{'s' * (len(others) > 1)}: {', '.join(others)}")
    with _token(here.checkout) as token, ThreadPoolExecutor(max_workers=len(others)) as pool:
        try:
            results = dict(zip(others, pool.map(lambda name: _result(name, here, token), others), strict=True))
        except BaseException:  # a signal; the pool would wait for its threads
            _is_over.set()
            for process in [*_remote]:
                process.terminate()
            raise
    width = max(map(len, results))
    for name, (ready, text) in results.items():
        say(f"{name:{width}}  {'ready' if ready else 'FAILED'}: {text}")
    return 0 if all(ready for ready, _ in results.values()) else 1


def _result(name: str, here: Here, token: Path) -> tuple[bool, str]:
    try:
        return True, _set_up(name, here, token)
    except HostFailed as failure:
        return False, str(failure)


def _set_up(name: str, here: Here, token: Path) -> str:
    """Set up one host like this one, and return a summary. Raises HostFailed."""
    compared = [file for file in here.files if file.startswith(PACKAGE) or file in COMPARED]
    listed = "".join(f"{_sha256(here.checkout / file)}  {file}\n" for file in compared)
    code = "".join(f"{file}\n" for file in compared if file.startswith(PACKAGE) and file.endswith(".py"))
    names = hashlib.sha256(code.encode()).hexdigest()
    look = here.fill(LOOK, token=shlex.quote(str(token)), names=names)
    said = _ask(name, look, listed.encode())
    if last_line(said) == "shared":
        return "shares this checkout"
    if last_line(said) != "same":
        with _sends:
            _send(name, here, last_line(_ask(name, look, listed.encode())))
    _ask(name, here.fill(NOTE), as_constraints(here.packages).encode())
    _run(name, _set_up_script(here))

    python = here.checkout / ".venv" / "bin" / "python"
    there = versions_of(lambda program: _ask(name, shlex.join([str(python), "-I", "-c", program])))
    different = differences(here.packages, there)
    if different:
        raise HostFailed(f"other versions than here: {', '.join(different)}")
    return f"{len(there)} packages, versions as here"


def _send(name: str, here: Here, state: str) -> None:
    """Send the checkout to a host, in the state that LOOK found. Raises HostFailed."""
    if state == "other":
        raise HostFailed(f"{here.checkout} there holds other files than here: update it, or move it away")
    if state not in ("absent", "sent", "same"):
        raise HostFailed(f"it answers {state[:80]!r}, which set-up does not know: see what its login shell prints")
    if state != "same":
        say(f"{name}: sending the checkout ({len(here.files)} files)")
        _ask(name, here.fill(UNPACK), _packed(here.checkout, here.files))


def _set_up_script(here: Here) -> str:
    version = ".".join(map(str, here.version))
    pythons = [here.python, f"python{version}", "python3"]
    return here.fill(
        SET_UP, pythons=shlex.join(pythons), wanted=str(here.version), version=version, flags=shlex.join(here.flags)
    )


@contextlib.contextmanager
def _started(command: list[str], stdin: int) -> Iterator[subprocess.Popen[bytes]]:
    """An ssh process, which a signal to this process ends. Raises HostFailed."""
    if _is_over.is_set():
        raise HostFailed("stopped")
    try:
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise HostFailed(ssh.NO_SSH) from None
    with process:
        _remote.add(process)
        try:
            if _is_over.is_set():  # meanwhile
                process.terminate()
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            _remote.discard(process)


def _ask(name: str, script: str, stdin: bytes = b"") -> str:
    """The output of a shell script on a host. Raises HostFailed."""
    with _started(ssh.words(name, ["sh", "-c", script]), subprocess.PIPE) as process:
        try:
            said, errors = process.communicate(stdin, SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            raise HostFailed(f"no answer within {SECONDS_TO_ANSWER:g} s") from None
    complaint = errors.decode(errors="replace")
    if process.returncode == ssh.FAILED:
        raise HostFailed(ssh.explain(name, complaint))
    if process.returncode:
        lines = complaint.strip().splitlines()
        raise HostFailed(lines[-1] if lines else f"exit code {process.returncode}")
    return said.decode(errors="replace")


def _run(name: str, script: str) -> None:
    """Run a shell script on a host, and print its output after the host's name. Raises HostFailed.

    The script gets a terminal (-tt), so that SIGHUP ends it when the connection breaks.
    """
    ssh_command, *words = ssh.words(name, ["sh", "-c", script])
    complaint = ""
    with _started([ssh_command, "-tt", *words], subprocess.DEVNULL) as process:
        assert process.stdout and process.stderr
        for whole in io.TextIOWrapper(process.stdout, errors="replace", newline="\n"):
            # Set-up draws its steps anew every second on a terminal.
            line = whole.rstrip().rpartition("\r")[2].replace("\033[K", "")
            if line.strip():
                say(f"{name}: {line}")
            if line.startswith("hvd_cifar: "):
                complaint = line.removeprefix("hvd_cifar: ")
        said = process.stderr.read().decode(errors="replace")
        code = process.wait()
    if code == ssh.FAILED:
        raise HostFailed(ssh.explain(name, said))
    if code:
        raise HostFailed(complaint or f"exit code {code}")


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
    """The files of a checkout, relative to it: those that git tracks, and new ones of the package."""
    git = ["git", "-C", str(checkout), "ls-files", "-z"]
    new = ["--others", "--exclude-standard", "--", PACKAGE]
    try:
        listed = []
        for words in ([*git, "--cached"], [*git, *new]):
            listed += subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):  # no git, or a copy without its history
        listed = []
    if "run.sh" not in listed:  # or a copy within another repository
        listed = []
        for folder, folders, names in os.walk(checkout):
            is_top = Path(folder) == checkout
            folders[:] = [f for f in folders if f not in CACHES and not (is_top and f in LEFT_OUT)]
            listed += [str((Path(folder) / name).relative_to(checkout)) for name in names]
    left_out = {SENT, VERSIONS, LOCK, ".venv"}
    found = {name for name in listed if name and name not in left_out and not SECRET.fullmatch(Path(name).name)}
    return tuple(sorted(name for name in found if (checkout / name).is_file()))


def _packed(checkout: Path, files: Sequence[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in files:
            archive.add(checkout / file, file)
    return packed.getvalue()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
