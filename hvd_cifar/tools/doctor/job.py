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
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil

from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.runtime.environment import RANK_VARIABLES
from hvd_cifar.runtime.process import signalled_with_parent
from hvd_cifar.tools.doctor.facts import Job, Link

RESULT = "hvd_cifar.doctor "  # the start of rank 0's line of JSON
BEGINS, ENDS = "doctor begins with", "doctor ends with"  # the start of lines that name the two ranks of a pair
LOCAL_RANKS = 2  # on each host: enough for a link between them; where GPUs compute, all take part
SECONDS_TO_END = 20.0
COMPLAINTS_KEPT = 20
CYCLE = "HOROVOD_CYCLE_TIME"  # ms; long, since its thread would disturb the pairs, which MPI sums


def command(hosts: Sequence[Host], named: bool, ring: bool) -> list[str]:
    """The launcher's options and command for a job on all slots of these hosts; `named`: with -H."""
    words = [*(["--allreduce", "ring"] if ring else []), "-np", str(sum(host.slots for host in hosts))]
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)] if named else []
    return [*words, "doctor-job", "--per-host", ",".join(str(host.slots) for host in hosts)]


def run(hosts: Sequence[Host], words: Sequence[str], seconds: float) -> Job:
    """Run the launcher with `words` for at most `seconds`. However the job ends, it leaves no process on any host."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *ISOLATED, "-m", "hvd_cifar.launch", *words],
        # Without the variables of a launcher that started the doctor itself.
        env={CYCLE: "10", **{name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}},
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
    said = output.decode(errors="replace"), errors.decode(errors="replace")
    found = result_of(hosts, process.returncode, *said, seconds if late else None)
    return found.model_copy(update={"seconds": time.monotonic() - begin})


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Have the launcher end the job on all hosts; kill what is left of it here. Returns its output."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=SECONDS_TO_END)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.kill()
    process.wait()
    with contextlib.suppress(subprocess.TimeoutExpired):  # another process may hold the pipe
        return process.communicate(timeout=SECONDS_TO_END)
    return b"", b""


def result_of(hosts: Sequence[Host], code: int, output: str, errors: str, late_after: float | None) -> Job:
    """The job's outcome, from its exit code and output; `late_after`: the time limit in seconds, if it was exceeded."""
    of_ranks = [host.name for host in hosts for _ in range(host.slots)]
    complaints, open_pairs = [], Counter[tuple[str, str]]()
    for line in errors.splitlines():
        if step := re.search(rf"({BEGINS}|{ENDS}) (\d+) (\d+)", line):
            open_pairs[of_ranks[int(step[2])], of_ranks[int(step[3])]] += 1 if step[1] == BEGINS else -1
        elif line.strip() and "hvd_cifar: note:" not in line:
            complaints.append(line.strip())
    common: dict[str, Any] = {
        "ranks": {host.name: host.slots for host in hosts},
        "complaints": complaints[-COMPLAINTS_KEPT:],
        "pending": [pair for pair, times in open_pairs.items() if times > 0],
        "pairs": len(hosts) * (len(hosts) - 1) // 2,
    }
    said = next((line for line in output.splitlines() if line.startswith(RESULT)), "")
    if late_after is not None:
        return Job(**common, failure=f"no end within {late_after:g} s")
    if code or not said:
        return Job(**common, failure=_telling(complaints) or f"it ended with exit code {code} and said nothing")
    found = json.loads(said.removeprefix(RESULT))
    names = ("ranks", "seconds", "bytes_per_second", "wrong_values")
    values = [dict(zip(names, link, strict=True)) for link in found.pop("links")]
    links = [Link(a=of_ranks[one["ranks"][0]], b=of_ranks[one["ranks"][1]], **one) for one in values]
    links.sort(key=lambda link: (link.a != link.b, link.ranks))
    return Job(**common, **found, links=tuple(links))


def _telling(complaints: Sequence[str]) -> str:
    """The line that best says what went wrong: the first error, else the launcher's message, else the last line."""
    own = [line.partition("hvd_cifar: ")[2] for line in complaints if "hvd_cifar: " in line]
    errors = [line for line in complaints if re.search(r"\b\w*(Error|Exception|error)\b", line)]
    return next(iter([*errors[:1], *own[:1], *complaints[-1:]]), "")
