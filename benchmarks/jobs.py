"""Training jobs for the benchmarks: N ranks from a command line, to their end or until they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hvd_cifar.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
ENDS = (signal.SIGTERM, signal.SIGHUP)


def command(ranks: int, *words: Any) -> list[str]:
    """`train` with options, on `ranks` ranks of this machine."""
    return [*(launcher(ranks) if ranks > 1 else []), sys.executable, "-m", "hvd_cifar", "train", *map(str, words)]


def launcher(ranks: int) -> list[str]:
    """The words that start a program on `ranks` ranks of this machine."""
    return ["mpirun", "-q", "-np", str(ranks), "--bind-to", "none"]


def environment() -> dict[str, str]:
    """Variables with which mpirun starts more ranks than cores, also as root in a container."""
    ours = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return {**os.environ, **ours}


def run(words: list[str], log: Path, more: Mapping[str, str] | None = None) -> None:
    """Run a command to its end; its output goes to a file. `more`: additional variables.

    Raises:
        UserError: where it ends with an error of the user, with its line.
        SystemExit: where it fails otherwise, with the end of its output.
    """
    log.unlink(missing_ok=True)
    job = start(words, log, more)
    try:
        code = job.wait()
    finally:
        kill(job)
    said = log.read_text().splitlines()
    told = [line for line in said if line.startswith("hvd_cifar: ")]
    if code == 2 and told:
        raise UserError(told[-1].removeprefix("hvd_cifar: "))
    if code:
        tail = "\n".join(said[-20:])
        raise SystemExit(f"{' '.join(words)}\nended with {code}:\n{tail}")


def start(words: list[str], log: Path, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which `kill` ends. `more`: additional variables."""
    env = {**environment(), **(more or {})}
    with log.open("a") as file:
        return subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=CHECKOUT, start_new_session=True
        )


def kill(job: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and all its ranks at once; nothing where they have ended."""
    if job.poll() is not None:
        return
    for process in (*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    job.wait()


def end_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this program as Ctrl-C does, so that no job stays behind. Later ones are ignored."""

    def end(number: int, _: object) -> None:
        for each in ENDS:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, end)
