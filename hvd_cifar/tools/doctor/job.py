"""The small real job: the launcher starts it, like a user's run, and it ends after a time limit at the latest.

Its ranks check the sums of all-reduces; rank 0 prints a line of JSON.
"""

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
from typing import Any

from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import RANK_VARIABLES
from hvd_cifar.runtime.process import signalled_with_parent
from hvd_cifar.tools.doctor.facts import Job
from hvd_cifar.tools.settings import DoctorJobSettings

RESULT = "hvd_cifar.doctor "  # stands before rank 0's line of JSON
SECONDS_TO_END = 20.0
TRIES = 3  # of each size
SIZES = [2**power for power in range(16, 25, 2)]  # bytes
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores


def run(words: Sequence[str], seconds: float) -> Job:
    """Run the launcher with `words` for at most `seconds`. However the job ends, it leaves no process on any host."""
    begin, pipe = time.monotonic(), subprocess.PIPE
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "errors": "replace"}
    process = subprocess.Popen(
        [sys.executable, *ISOLATED, "-m", "hvd_cifar.launch", *words, "doctor-job"],
        # Without the variables of a launcher that started the doctor itself.
        env={name: value for name, value in os.environ.items() if name not in RANK_VARIABLES},
        **pipes,
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
    # A login shell may have printed before it, without ending its line.
    said = output.partition(RESULT)[2].partition("\n")[0]
    if late or code or not said:
        # The line that best says what went wrong: the first error, else the launcher's message, else the last line.
        telling = [line for line in lines if re.search(r"\b\w*(Error|Exception|error)\b", line)][:1]
        telling += [line.partition("hvd_cifar: ")[2] for line in lines if "hvd_cifar: " in line][:1] + lines[-1:]
        telling += [f"it ended with exit code {code} and said nothing"]
        return Job(late or telling[0], seconds=seconds)
    how, wrong_values, rate = json.loads(said)
    return Job("", how, wrong_values, rate, seconds)


def run_rank(_: DoctorJobSettings) -> None:
    """This rank's part."""
    from hvd_cifar.runtime.world import session
    from hvd_cifar.tools.benchmark import allreduce

    with session() as world:
        reduce, wrong = allreduce.through_horovod(), 0
        for size in SIZES:
            found = allreduce.measure_size(world, reduce, size, TRIES, seconds=0)
            wrong += found.wrong_values
            if found.seconds["mean"] >= ENOUGH_SECONDS:
                break
        if world.is_root:
            terminal.say(RESULT + json.dumps([world.describe(), wrong, found.bus_bandwidth]))
