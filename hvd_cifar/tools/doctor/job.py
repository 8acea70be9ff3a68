"""The small real job: the launcher starts it, like a user's run, and it ends after a time limit at the latest.

Its ranks check the sums of all-reduces, then exchange messages between neighbouring hosts; rank 0 prints a line of
JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import RANK_VARIABLES
from hvd_cifar.runtime.process import signalled_with_parent
from hvd_cifar.tools.doctor.facts import Job
from hvd_cifar.tools.settings import DoctorJobSettings

if TYPE_CHECKING:
    from hvd_cifar.runtime.world import World

RESULT = "hvd_cifar.doctor "  # the start of rank 0's line of JSON
SECONDS_TO_END = 20.0
TRIES = 3  # of each size, and of each link
SIZES = [2**power for power in range(16, 25, 2)]  # bytes
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores
# Of all links together, as far as messages do not get so small that their latency hides the bandwidth.
RING_SECONDS, LEAST_LINK_BYTES = 20.0, 2**20
LEAST_RING = 3  # hosts: two have one link, which nothing is compared with


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
    said = next((line for line in output.splitlines() if line.startswith(RESULT)), "")
    if late or code or not said:
        # The line that best says what went wrong: the first error, else the launcher's message, else the last line.
        telling = [line for line in lines if re.search(r"\b\w*(Error|Exception|error)\b", line)][:1]
        telling += [line.partition("hvd_cifar: ")[2] for line in lines if "hvd_cifar: " in line][:1] + lines[-1:]
        telling += [f"it ended with exit code {code} and said nothing"]
        return Job(late or telling[0], seconds=seconds)
    how, wrong_values, rate, links = json.loads(said.removeprefix(RESULT))
    return Job("", how, wrong_values, rate, tuple(links), seconds)


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
        rates = measure_links(world, found.bus_bandwidth)
        if world.is_root:
            terminal.say(RESULT + json.dumps([world.describe(), wrong, found.bus_bandwidth, rates]))


def measure_links(world: World, rate: float) -> list[float]:
    """Bytes per second between each host and the next one, the last host and the first; [] below three hosts.

    The hosts' first ranks measure by MPI, one link after another. The shortest try counts: other work on a host only
    makes a try longer. A collective. `rate`: bytes per second in all-reduces over all ranks.
    """
    from hvd_cifar.runtime.world import mpi

    ranks, firsts = mpi().COMM_WORLD, [rank for rank, facts in enumerate(world.ranks) if facts.local_rank == 0]
    if len(firsts) < LEAST_RING:
        return []
    affordable = RING_SECONDS * rate / (len(firsts) * TRIES)
    message = np.zeros(int(min(SIZES[-1], max(LEAST_LINK_BYTES, affordable))), np.uint8)
    rates = []
    for a, b in zip(firsts, [*firsts[1:], firsts[0]], strict=True):
        took = math.inf if world.rank in (a, b) else 0.0
        for _ in range(TRIES):
            ranks.Barrier()
            begin = time.perf_counter()
            if world.rank == a:
                ranks.Send(message, b)
                ranks.Recv(message, b)
            elif world.rank == b:
                ranks.Recv(message, a)
                ranks.Send(message, a)
            took = min(took, time.perf_counter() - begin)
        rates.append(2 * len(message) / max(ranks.allgather(took)))
    return rates
