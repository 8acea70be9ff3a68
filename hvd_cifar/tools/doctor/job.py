"""The small real job: started by the launcher, like a user's run, and ended after a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.runtime.environment import RANK_VARIABLES
from hvd_cifar.runtime.process import signalled_with_parent
from hvd_cifar.tools.doctor.facts import Job, Link

RESULT = "hvd_cifar.doctor "  # the start of rank 0's line of JSON
BEGINS, ENDS = "doctor begins with", "doctor ends with"  # the start of lines that name the two ranks of a pair
SECONDS_TO_END = 20.0
LOCAL_RANKS = 2  # on each host: enough for a link between them; where GPUs compute, all
COMPLAINTS_KEPT = 20


def command(hosts: Sequence[Host], unnamed: bool, ring: bool, on_gpus: bool) -> list[str]:
    """The launcher's options and command for a job on all slots of these hosts; `unnamed`: without -H."""
    words = ["--allreduce", "ring"] if ring else []
    words += ["-np", str(sum(host.slots for host in hosts))]
    if not unnamed:
        words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    return [*words, "doctor-job", "--per-host", ",".join(str(host.slots) for host in hosts), *["--on-gpus"] * on_gpus]


def run(hosts: Sequence[Host], unnamed: bool, ring: bool, on_gpus: bool, seconds: float) -> Job:
    """Run the job for at most `seconds`. However it ends, it leaves no process on any host."""
    words = [sys.executable, *ISOLATED, "-m", "hvd_cifar.launch", *command(hosts, unnamed, ring, on_gpus)]
    begin = time.monotonic()
    process = subprocess.Popen(
        words,
        env=_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches it once, from this process
        preexec_fn=signalled_with_parent(signal.SIGTERM),
    )
    late = False
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        output, errors = _end(process)
    finally:
        if process.poll() is None:
            _end(process)
    said = errors.decode(errors="replace")
    found = result_of(hosts, process.returncode, output.decode(errors="replace"), said, seconds if late else None)
    return found.model_copy(update={"seconds": time.monotonic() - begin})


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The job's variables: the user's, without those of a launcher that started the doctor itself.

    Small all-reduces are timed without Horovod, whose thread would disturb them: its cycle (ms) is long.
    """
    kept = {name: value for name, value in environ.items() if name not in RANK_VARIABLES}
    return {"HOROVOD_CYCLE_TIME": "10", **kept}


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Have the launcher end the job on all hosts; kill what is left of it here. Returns its output."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        return process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
        process.kill()
        process.wait()
    try:
        return process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:  # another process holds the pipe
        return b"", b""


def result_of(hosts: Sequence[Host], code: int, output: str, errors: str, late_after: float | None) -> Job:
    """The job's outcome, from its exit code and output; `late_after`: the time limit in seconds, if it was exceeded."""
    of_ranks = [host.name for host in hosts for _ in range(host.slots)]
    complaints, pending = _sorted_out(errors, of_ranks)
    common: dict[str, Any] = {
        "ranks": {host.name: host.slots for host in hosts},
        "complaints": complaints[-COMPLAINTS_KEPT:],
        "pairs": len(hosts) * (len(hosts) - 1) // 2,
    }
    said = next((line for line in output.splitlines() if line.startswith(RESULT)), "")
    if late_after is not None:
        return Job(**common, failure=f"no end within {late_after:g} s", pending=tuple(pending))
    if code or not said:
        reason = _telling(complaints) or f"it ended with exit code {code} and said nothing"
        return Job(**common, failure=reason, pending=tuple(pending))
    found = json.loads(said.removeprefix(RESULT))
    links = [
        Link(
            a=of_ranks[int(a)],
            b=of_ranks[int(b)],
            ranks=(int(a), int(b)),
            seconds=late,
            bytes_per_second=fast,
            wrong_values=int(wrong),
        )
        for a, b, late, fast, wrong in found.pop("links")
    ]
    return Job(**common, **found, links=tuple(sorted(links, key=lambda link: (link.a != link.b, link.a, link.b))))


def _sorted_out(errors: str, of_ranks: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The lines of stderr that are complaints, and the hosts of pairs that began and did not end."""
    complaints = []
    open_pairs: dict[tuple[int, int], int] = {}
    for line in errors.splitlines():
        step = re.search(rf"({BEGINS}|{ENDS}) (\d+) (\d+)", line)
        if step:
            pair = (int(step[2]), int(step[3]))
            open_pairs[pair] = open_pairs.get(pair, 0) + (1 if step[1] == BEGINS else -1)
        elif line.strip() and "hvd_cifar: note:" not in line:
            complaints.append(line.strip())
    hung = [(of_ranks[a], of_ranks[b]) for (a, b), times in open_pairs.items() if times > 0 and b < len(of_ranks)]
    return complaints, hung


def _telling(complaints: Sequence[str]) -> str:
    """The line that best says what went wrong: the first error, else the launcher's message, else the last line."""
    own = [line.partition("hvd_cifar: ")[2] for line in complaints if "hvd_cifar: " in line]
    errors = [line for line in complaints if re.search(r"\b\w*(Error|Exception|error)\b", line)]
    return next(iter([*errors[:1], *own[:1], *complaints[-1:]]), "")
