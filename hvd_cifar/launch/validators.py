"""Validation ranks (`--validation-ranks K`): a separate job on the last K slots, which evaluates during training.

The job has its own launcher process, as if a user had started a second job. Its failures therefore do not affect the
training ranks, whose collectives are those of a run without validation ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hvd_cifar.errors import UserError
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks
from hvd_cifar.launch.job import complain, remove_session, write
from hvd_cifar.launch.request import Request
from hvd_cifar.launch.roster import first_slots
from hvd_cifar.runtime.environment import BESIDE, Beside
from hvd_cifar.runtime.process import signalled_with_parent

SECONDS_TO_END = 10.0


def set_apart(request: Request, ranks: int) -> tuple[Request, int]:
    """Reserve the last `validation_ranks` of `ranks` slots. Return the new request, and the number of training ranks.

    Raises UserError where no rank is left to train.
    """
    training = ranks - request.settings.validation_ranks
    if training < 1:
        raise UserError(
            f"--validation-ranks {request.settings.validation_ranks}: of {ranks} ranks none is left to train; "
            f"give -np {request.settings.validation_ranks + 1} or more"
        )
    names = hosts_of_ranks(request.hosts, ranks)
    last = tuple(Host(name, slots) for name, slots in Counter(names[training:]).items())
    return replace(request, hosts=first_slots(request.hosts, training), validators=last), training


def neighbours(validators: Sequence[Host], host: str) -> dict[str, str]:
    """A variable for training ranks: the number of validation ranks on `host`, the last training rank's host."""
    after = next((one.slots for one in validators if one.name == host), 0)
    return {BESIDE: json.dumps(Beside(0, after))} if validators else {}


def words(request: Request) -> list[str]:
    """The command that starts the launcher of the validation ranks."""
    hosts = ",".join(f"{host.name}:{host.slots}" for host in request.validators)
    program = [sys.executable, *ISOLATED, "-m", "hvd_cifar.launch"]
    return [*program, "-H", hosts, "validate", "--run-dir", str(request.run_dir)]


@contextlib.contextmanager
def beside(request: Request, training: Sequence[str]) -> Iterator[None]:
    """Run the request's validation ranks, if any, during the block. None of their processes is left after it.

    `training`: the host of each rank that trains.
    """
    if not request.validators:
        yield
        return
    before = Beside(training.count(request.validators[0].name), 0)
    process = subprocess.Popen(
        words(request),
        # Without HOROVOD_TIMELINE: the file is that of the training ranks.
        env={name: value for name, value in os.environ.items() if name != "HOROVOD_TIMELINE"}
        | {BESIDE: json.dumps(before)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches training only, at whose end this job stops
        preexec_fn=signalled_with_parent(signal.SIGTERM),
    )
    is_over = threading.Event()
    reader = threading.Thread(target=_tell_of_end, args=[process, is_over], daemon=True)
    reader.start()
    try:
        yield
    finally:
        is_over.set()
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()  # its children are signalled with it
            process.wait()
            remove_session(process.pid, os.environ)  # MPI's files, if it was a single rank
        reader.join(SECONDS_TO_END)


def _tell_of_end(process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Print in one line, if validation ranks end before training, that they do, and why."""
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").splitlines()
    code = process.wait()
    if is_over.is_set():
        return
    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = [line for line in said if not line.startswith("hvd_cifar: note: ")]  # training prints the same notes
    if lines and lines[-1].startswith("hvd_cifar: "):
        cause = lines.pop().removeprefix("hvd_cifar: ")
    write(2, os.fsencode("".join(f"{line}\n" for line in lines)))
    complain(f"validation ranks have ended ({cause}); training goes on, and evaluations of later steps are missing")
