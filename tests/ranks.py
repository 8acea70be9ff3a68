"""Run one function in several real ranks, and get what each returned.

    def mean_rank() -> float:
        import horovod.tensorflow as hvd
        hvd.init()
        return float(hvd.allreduce(float(hvd.rank())))

    def test_mean_rank() -> None:
        assert run_ranks(mean_rank, 2) == [0.5, 0.5]

The function must stand at the top level of its module; the module is imported by path in every rank, so keep what
it imports at its top cheap. Arguments and return values travel as JSON: a tuple comes back as a list, a NumPy array
or scalar as lists or numbers.

A rank takes seconds to start, most of them for TensorFlow's import: `run_all` calls several functions in one start.
"""

import importlib.util
import inspect
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import psutil

CHECKOUT = Path(__file__).resolve().parent.parent
LOG_TAIL_LINES = 40
JOB = "TEST_JOB"
Jobs = Callable[[int, str], dict[str, list[Any]]]  # what `run_all` returned for a number of ranks and a launcher
LAUNCHERS = {
    "mpirun": ["mpirun", "-np", "{n}", "--bind-to", "none", "--map-by", "slot", "--oversubscribe"],
    "horovodrun": ["horovodrun", "--mpi", "-np", "{n}", "-H", "localhost:{n}"],
    "gloo": ["horovodrun", "--gloo", "-np", "{n}", "-H", "localhost:{n}"],
    "none": [],
}


class RanksFailed(Exception):
    """A rank failed, or the job ran too long. `returncode` is None after a timeout; `logs` has a text per rank."""

    def __init__(self, reason: str, returncode: int | None, logs: list[str], launcher_output: str) -> None:
        self.returncode = returncode
        self.logs = logs
        tails = [f"--- rank {rank}\n{_tail(log)}" for rank, log in enumerate(logs)]
        super().__init__("\n".join([reason, *tails, f"--- launcher\n{_tail(launcher_output)}"]))


def run_ranks(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    launcher: str = "mpirun",
    env: dict[str, str] | None = None,
    timeout: float = 120,
    tensorflow: bool = True,
) -> list[Any]:
    """Call `function(*args)` in `n` ranks and return their return values, by rank.

    `launcher` is "mpirun", "horovodrun" (over MPI), "gloo" (horovodrun --gloo) or "none" (no launcher, n = 1).
    `env` is added to the environment. After `timeout` seconds, and after any failure, no process is left behind.
    `tensorflow` imports it first, as a rank of `train` does.

    Raises RanksFailed, with the end of every rank's output, where a rank fails or time runs out.
    """
    functions = {function.__name__: partial(function, *args)}
    found = run_all(functions, n, launcher=launcher, env=env, timeout=timeout, tensorflow=tensorflow)
    return found[function.__name__]


def run_all(
    functions: Mapping[str, Callable[..., Any]],
    n: int,
    *,
    launcher: str = "mpirun",
    env: dict[str, str] | None = None,
    timeout: float = 120,
    tensorflow: bool = True,
) -> dict[str, list[Any]]:
    """Call functions one after the other in one start of `n` ranks; return the values of each by its name, by rank.

    Arguments are given by `functools.partial`. Every function finds Keras's types as they are at a start; whatever else
    it changes, it puts back, unless it is the last. All others are as in `run_ranks`; the first failure ends the job.
    """
    calls = []
    for name, function in functions.items():
        call = partial(function)
        source = str(Path(inspect.getfile(call.func)).resolve())
        calls.append([name, source, call.func.__name__, call.args, call.keywords])
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        folder = Path(temporary)
        (folder / "calls.json").write_text(json.dumps([tensorflow, calls], default=_plain))
        command = [word.format(n=n) for word in LAUNCHERS[launcher]]
        command += [sys.executable, str(Path(__file__).resolve()), temporary]
        with (folder / "launcher.log").open("w") as log:
            returncode = run_to_end(command, timeout, stdout=log, stderr=log, env=environment(env), cwd=CHECKOUT)

        logs = [_read(folder / f"rank-{rank}.log") for rank in range(n)]
        files = [folder / f"rank-{rank}.json" for rank in range(n)]
        if returncode == 0 and all(file.exists() for file in files):
            ranks = [json.loads(file.read_text()) for file in files]
            return {name: [results[name] for results in ranks] for name in functions}
        reason = f"{', '.join(functions)} on {n} ranks ({launcher}): "
        reason += f"no end after {timeout} s" if returncode is None else f"exit code {returncode}"
        raise RanksFailed(reason, returncode, logs, _read(folder / "launcher.log"))


def once(start: Jobs) -> Jobs:
    """`start`, but each job once: a second call with the same arguments returns, or raises, what the first one did."""

    @cache
    def outcome(n: int, launcher: str) -> dict[str, list[Any]] | RanksFailed:
        try:
            return start(n, launcher)
        except RanksFailed as failed:
            return failed

    def results(n: int, launcher: str) -> dict[str, list[Any]]:
        found = outcome(n, launcher)
        if isinstance(found, RanksFailed):
            raise found
        return found

    return results


def command(words: Sequence[Any]) -> dict[str, Any]:
    """Run a command line of the package in this rank, as `python -m hvd_cifar` does; for `run_all`, several in turn.

    Returns its exit code as "code", and what this rank wrote, from Python or not: the lines of standard output as
    "said", those of standard error as "errors". No rank waits before it exits with an error.
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
    return {**defaults, **os.environ, "PATH": path, **(extra or {})}


def run_to_end(command: list[str], timeout: float, **popen: Any) -> int | None:
    """Run `command` and return its exit code, or None if it was stopped after `timeout` seconds.

    Its descendants end with it, in either case. A launcher puts each rank in a process group of its own, and may end
    before them: they are found by a variable.
    """
    env, mark = popen.get("env") or os.environ, secrets.token_hex(8)
    popen["env"] = {**env, JOB: f"{env.get(JOB, '')} {mark}"}  # a test run in a test has both marks
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **popen)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_tree(process)
        for left in psutil.process_iter():
            with suppress(psutil.Error):
                if mark in left.environ().get(JOB, ""):
                    left.kill()


def end_tree(process: "subprocess.Popen[Any]") -> None:
    """End a process and its descendants: asked first, so that a launcher can tidy up, then killed."""
    if process.poll() is not None:
        return
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=5)
    for member in alive:
        member.kill()
    process.wait()


def _rank_main(folder: Path) -> None:
    """One rank's part: call the functions named in `calls.json`, write what they return."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))
    with (folder / f"rank-{rank}.log").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.path[:0] = [str(CHECKOUT)]
    tensorflow, calls = json.loads((folder / "calls.json").read_text())
    if tensorflow:
        from hvd_cifar.reporting.quiet import quiet_start

        with quiet_start():  # as in a rank of `train`: it takes a quarter less time than the bare imports
            import horovod.tensorflow  # noqa: F401
    results = {}
    for name, module, function, args, keywords in calls:
        print(f"--- {name}", flush=True)  # the log ends with what failed
        results[name] = getattr(_import_file(Path(module)), function)(*args, **keywords)
        _put_types_back()
    part = folder / f"rank-{rank}.part"
    part.write_text(json.dumps(results, default=_plain))
    part.rename(folder / f"rank-{rank}.json")


def _put_types_back() -> None:
    keras = sys.modules.get("keras")
    if keras:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@cache
def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _plain(value: Any) -> Any:
    """What JSON cannot write: arrays and scalars of NumPy (and what turns into them), paths, sets."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
