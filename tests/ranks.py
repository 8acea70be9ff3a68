"""Run one function in several real ranks, and get what each returned: `run_ranks(mean_rank, 2) == [0.5, 0.5]`.

The function must stand at the top level of its module; the module is imported by path in every rank, so keep what
it imports at its top cheap. Arguments and return values travel as JSON: a tuple comes back as a list, a NumPy array
or scalar as lists or numbers.

A rank takes seconds to start, most of them for TensorFlow's import. So one group of ranks of each size, started by
mpirun, serves all files of a process of pytest. They find Keras's types, the environment, the folder and random numbers
as at a start. What TensorFlow or Horovod keeps for a whole process, such as threads, takes ranks of its own:
`fresh=True`, or anything but the default launcher and environment.
"""

import inspect
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.rank import POLL_SECONDS, plain

CHECKOUT = Path(__file__).resolve().parent.parent
RANK = [sys.executable, str(CHECKOUT / "tests" / "rank.py")]
MOST_POOLED = 3  # ranks of a group that stays; more are rare
JOB = "TEST_JOB"
Jobs = Callable[[int], dict[str, list[Any]]]  # what `run_all` has returned for a number of ranks


class RanksFailed(Exception):
    """A rank failed, or the job ran too long: the last lines of each rank and of the launcher."""


def run_ranks(function: Callable[..., Any], n: int, *args: Any, **how: Any) -> list[Any]:
    """Call `function(*args)` in `n` ranks and return their return values, by rank. `how`: as in `run_all`."""
    return run_all({function.__name__: partial(function, *args)}, n, **how)[function.__name__]


def run_all(
    functions: Mapping[str, Callable[..., Any]],
    n: int,
    *,
    launcher: str = "mpirun",
    env: dict[str, str] | None = None,
    timeout: float = 120,
    tensorflow: bool = True,
    deterministic: bool = False,
    fresh: bool = False,
) -> dict[str, list[Any]]:
    """Call functions one after the other in the same `n` ranks; return the values of each by its name, by rank.

    Arguments are given by `functools.partial`. Raises RanksFailed at the first failure and after `timeout` seconds;
    then no process is left behind.

    Args:
        launcher: "mpirun", "gloo" (horovodrun --gloo), or "" (the one rank is a program that nothing has launched).
        env: is added to the environment.
        tensorflow: it is imported first, as by a rank of `train`.
        deterministic: the ranks can train with --deterministic.
        fresh: the ranks serve no other test.
    """
    calls = []
    for name, function in functions.items():
        call = partial(function)
        source = str(Path(inspect.getfile(call.func)).resolve())
        calls.append([name, source, call.func.__name__, call.args, call.keywords])
    text = json.dumps([tensorflow, deterministic, calls], default=plain)
    what = f"{', '.join(functions)} on {n} ranks"
    if launcher == "mpirun" and n <= MOST_POOLED and tensorflow and not env and not fresh:
        ranks = (_GROUPS.get(n) or Group(n)).call(text, timeout, what)
    else:
        with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
            folder, output = Path(temporary), Path(temporary, "launcher.log")
            (folder / "calls.json").write_text(text)
            starts = {
                "mpirun": mpirun(n),
                "gloo": ["horovodrun", "--gloo", "-np", str(n), "-H", f"localhost:{n}"],
                "": [],
            }
            words = [*starts[launcher], *RANK, temporary]
            with output.open("w") as log:
                code = run_to_end(words, timeout, stdout=log, stderr=log, env=environment(env), cwd=CHECKOUT)
            found = _returned(folder, n)
            if code or not found:
                raise _failure(what, timeout, code, folder, n, output)
            ranks = found
    return {name: [results[name] for results in ranks] for name in functions}


def error_of(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """Type and text of the error of a call; "accepted" where there is none."""
    try:
        call(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def mpirun(n: int) -> list[str]:
    """The words that start a program on `n` ranks of this machine."""
    return ["mpirun", "-np", str(n), "--bind-to", "none", "--map-by", "slot", "--oversubscribe"]


def _returned(folder: Path, n: int) -> list[dict[str, Any]] | None:
    """What the functions of a job returned, by rank; None where a rank has not returned."""
    files = [folder / f"rank-{rank}.json" for rank in range(n)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else None


def _failure(what: str, timeout: float, returncode: int | None, folder: Path, n: int, output: Path) -> RanksFailed:
    reason = f"{what}: " + (f"no end after {timeout} s" if returncode is None else f"exit code {returncode}")
    logs = {f"rank {rank}": folder / f"rank-{rank}.log" for rank in range(n)} | {"launcher": output}
    return RanksFailed("\n".join([reason, *(f"--- {name}\n{_tail(path)}" for name, path in logs.items())]))


class Group:
    """Ranks that wait for functions to call, until `end` or the end of this process, or until one of them fails."""

    def __init__(self, n: int) -> None:
        self.n, self.jobs = n, 0
        _GROUPS[n] = self
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.output, self.mark = self.folder / "launcher.log", secrets.token_hex(8)
        with self.output.open("w") as log:
            self.process = subprocess.Popen(
                [*mpirun(n), *RANK, str(self.folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(_marked(os.environ, self.mark)),
                cwd=CHECKOUT,
                start_new_session=True,
            )

    def call(self, calls: str, timeout: float, what: str) -> list[dict[str, Any]]:
        """What the ranks return; where one fails or time runs out, they end."""
        job = self.folder / str(self.jobs)
        self.jobs += 1
        job.mkdir()
        (job / "calls.part").write_text(calls)
        (job / "calls.part").rename(job / "calls.json")
        end = time.monotonic() + timeout
        while (found := _returned(job, self.n)) is None and self.process.poll() is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if found is not None:
            return found
        returncode = self.process.poll()
        failure = _failure(what, timeout, returncode, job, self.n, self.output)
        self.end()
        raise failure

    def end(self) -> None:
        """End the ranks."""
        _GROUPS.pop(self.n, None)
        _end_all(self.process, self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)


_GROUPS: dict[int, Group] = {}


def end_groups() -> None:
    """End all ranks that wait."""
    for group in list(_GROUPS.values()):
        group.end()


def command(words: Sequence[Any]) -> dict[str, Any]:
    """Run a command line of the package in this rank, as `python -m hvd_cifar` does.

    Returns its exit code as "code", and the lines that this rank wrote, from Python or not: of standard output as
    "said", of standard error as "errors". No rank waits before it exits with an error.
    """
    from hvd_cifar import cli
    from hvd_cifar.training.preemption import SIGNALS

    code: Any = None
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with _lines_of(1) as said, _lines_of(2) as errors, mock.patch.object(cli, "GRACE_SECONDS", 0.0):
        try:
            cli.main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        finally:
            for number, handler in handlers.items():  # after `train` they are ignored
                signal.signal(number, handler or signal.SIG_DFL)
    return {"code": code, "said": said, "errors": errors}


def run_command(n: int, *words: Any, code: int = 0, **how: Any) -> list[dict[str, Any]]:
    """Run a command line of the package on `n` ranks, which must end with this code: what `command` returns, by rank.

    `how`: as in `run_all`.
    """
    ranks = run_ranks(command, n, words, **how)
    assert [rank["code"] for rank in ranks] == [code] * n, ranks
    return ranks


@contextmanager
def _lines_of(stream: int) -> Iterator[list[str]]:
    """The lines that are written to a file descriptor in the block, which fill the list at its end."""
    lines: list[str] = []
    before = os.dup(stream)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), stream)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(before, stream)
            os.close(before)
            file.seek(0)
            text = file.read()
            os.write(stream, text)  # the rank's log has them also
            lines += text.decode(errors="replace").splitlines()


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment for a job of several ranks that share few cores, perhaps as root in a container."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    defaults = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # Without a launcher, MPI would start a daemon, which Open MPI's package does not find.
        "OMPI_MCA_ess_singleton_isolated": "1",
        # More ranks than cores: one that waits must not take the core from one that computes.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
    }
    # No run downloads CIFAR-10: nobody listens at this port.
    return {**defaults, **os.environ, "PATH": path, "https_proxy": "http://127.0.0.1:9", **(extra or {})}


def run_to_end(command: list[str], timeout: float, **popen: Any) -> int | None:
    """Run `command` and return its exit code, or None if it was stopped after `timeout` seconds.

    Its descendants end with it, in either case.
    """
    env, mark = popen.get("env") or os.environ, secrets.token_hex(8)
    popen["env"] = {**env, **_marked(env, mark)}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **popen)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_all(process, mark)


def wait_for(
    condition: Callable[[], Any], what: str, seconds: float = 120, job: "subprocess.Popen[Any] | None" = None
) -> None:
    """Wait until something holds; fails after a time that no sound machine needs, and where `job` ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and (job is None or job.poll() is None), f"waited in vain for {what}"
        time.sleep(0.05)


def processes_of(run_dir: Path) -> list[str]:
    """The command lines of all processes that have a run's folder in theirs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(run_dir) in process.cmdline():
                found.append(" ".join(process.cmdline()))
    return found


def _marked(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """The variable by which `_end_all` finds a job's processes. A test run in a test has both marks."""
    return {JOB: f"{env.get(JOB, '')} {mark}"}


def _end_all(process: "subprocess.Popen[Any]", mark: str) -> None:
    """End a launcher, which is asked first, so that it can tidy up, and its ranks, which may outlive it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    for left in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in left.environ().get(JOB, ""):
                left.kill()
    process.wait()


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-40:]) if path.exists() else ""
