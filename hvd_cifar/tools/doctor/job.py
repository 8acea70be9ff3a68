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
from collections.abc import Sequence

from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.runtime.environment import RANK_VARIABLES
from hvd_cifar.runtime.process import signalled_with_parent
from hvd_cifar.tools.doctor.facts import Job

RESULT = "hvd_cifar.doctor "  # the start of rank 0's line of JSON
SECONDS_TO_END = 20.0
COMPLAINTS_KEPT = 20


def command(hosts: Sequence[Host], named: bool, ring: bool) -> list[str]:
    """The launcher's options and command for a job on all slots of these hosts; `named`: with -H."""
    words = [*(["--allreduce", "ring"] if ring else []), "-np", str(sum(host.slots for host in hosts))]
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)] if named else []
    return [*words, "doctor-job"]


def run(words: Sequence[str], seconds: float) -> Job:
    """Run the launcher with `words` for at most `seconds`. However the job ends, it leaves no process on any host."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *ISOLATED, "-m", "hvd_cifar.launch", *words],
        # Without the variables of a launcher that started the doctor itself.
        env={name: value for name, value in os.environ.items() if name not in RANK_VARIABLES},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it once, from this process
        preexec_fn=signalled_with_parent(signal.SIGTERM),
    )
    output = errors = late = ""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"no end within {seconds:g} s"
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher then ends the job on all hosts
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=SECONDS_TO_END)
            process.kill()
    return result_of(process.returncode, output, errors, late, time.monotonic() - begin)


def result_of(code: int | None, output: str, errors: str, late: str, seconds: float) -> Job:
    """The job's outcome, from its exit code and output; `late`: what to say if it exceeded the time limit, else ""."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "hvd_cifar: note:" not in line]
    complaints = tuple(lines[-COMPLAINTS_KEPT:])
    said = next((line for line in output.splitlines() if line.startswith(RESULT)), "")
    if late or code or not said:
        failure = late or _telling(lines) or f"it ended with exit code {code} and said nothing"
        return Job(failure, complaints, seconds=seconds)
    how, wrong_values, rate, links = json.loads(said.removeprefix(RESULT))
    return Job("", complaints, how, wrong_values, rate, tuple(links), seconds)


def _telling(complaints: Sequence[str]) -> str:
    """The line that best says what went wrong: the first error, else the launcher's message, else the last line."""
    own = [line.partition("hvd_cifar: ")[2] for line in complaints if "hvd_cifar: " in line]
    errors = [line for line in complaints if re.search(r"\b\w*(Error|Exception|error)\b", line)]
    return next(iter([*errors[:1], *own[:1], *complaints[-1:]]), "")
