"""A job on the same hosts to its end: one start, restarts (`--max-restarts`), and validation ranks beside it.

Validation ranks (`--validation-ranks K`) are a second job on the last K slots, which evaluates during training. It has
a launcher process of its own, as if a user had started it. It takes part in no collective of the training ranks, so its
failures do not affect them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_cifar import config
from hvd_cifar.errors import DIVERGED, OUT_OF_SYNC, RESUME, UserError
from hvd_cifar.files import complain, write
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks
from hvd_cifar.launch.command import Request, as_typed, cores_here, first_slots, make_starter
from hvd_cifar.launch.job import Job, Starter, remove_session
from hvd_cifar.runtime.environment import BESIDE, Beside
from hvd_cifar.runtime.process import signalled_with_parent

SECONDS_TO_END = 10.0  # for validation ranks
MOST_ALIKE = 3  # starts in a row that end after the same step: the job does not start again
END_BYTES = 1 << 20  # of metrics.jsonl, which grows with the run: some thousand lines
# Exit codes after which a job never restarts: success, a user's error, stopped as asked, and a second Ctrl-C.
FINAL = (0, 2, RESUME, 128 + signal.SIGINT)


def launch(request: Request, settings: Any) -> int:
    """Run a job on all of the request's hosts, and return its exit code. Raises UserError.

    `settings`: of its command; None: it is a program of the user's own.
    """
    given = request.settings
    request, validation = split(request) if given.validation_ranks else (request, None)
    if isinstance(settings, config.TrainSettings) and not given.dry_run:
        config.check_ranks(settings, request.ranks or 1)
    starter = make_starter(request)
    if given.dry_run:
        lines = [as_typed(starter), *([shlex.join(_words_of(validation))] if validation else [])]
        write(1, os.fsencode("".join(f"{line}\n" for line in lines)))
        return 0
    if Path(starter.words[0]).name != "mpirun":  # a single rank, which needs no launcher
        os.execve(starter.words[0], starter.words, starter.env)

    cores, ranks = cores_here(), (request.ranks or 1) + given.validation_ranks
    if ranks > cores and not starter.hosts:
        complain(f"note: {ranks} ranks share {cores} core{'s' * (cores > 1)}: results are right, but slow")
    job = Job(can_stop=request.command[0] == "train")
    with _running(validation) if validation else contextlib.nullcontext():
        code = job.run(starter)
        if given.max_restarts:
            code = _restart(code, request, job, starter)
    return code


def _restart(code: int, request: Request, job: Job, starter: Starter) -> int:
    """Restart a failed job until it succeeds, is stopped or is given up. Return its exit code."""
    most, restart, ends = request.settings.max_restarts, 0, Ends()
    while code not in FINAL and job.wait(0):  # a program of the user's ends with the signal's code
        if not request.is_program and job.last_words:  # else no rank ran: a host may be booting
            ends.add(last_step(request.run_dir))
        reason = ends.why_no_other_start(job.tail) or f"--max-restarts {most}" * (restart == most)
        if reason:
            complain(f"exit code {code}; the job does not start again: {reason}")
            return code
        restart += 1
        seconds = min(60, 2 ** (restart - 1))
        where = "its own checkpoints" if request.is_program else f"the newest checkpoint in {request.run_dir}"
        complain(f"exit code {code}; restart {restart} of {most} in {seconds} s, from {where}")
        if not job.wait(seconds):
            return RESUME
        code = job.run(starter)
    return code


class Ends:
    """How many of the last starts of a job have ended after the same step."""

    def __init__(self) -> None:
        self._step: int | None = None  # None: it is not known
        self._alike = 0

    def add(self, step: int | None) -> None:
        """A start has ended after a step."""
        self._alike = (self._alike if step == self._step else 0) + (step is not None)
        self._step = step

    def why_no_other_start(self, tail: bytes) -> str:
        """Why another start would end as the last ones did; "": it may not. `tail`: the end of the job's stderr."""
        if DIVERGED.encode() in tail or OUT_OF_SYNC.encode() in tail:
            return "it would fail in the same way"
        return f"{MOST_ALIKE} starts in a row ended after the same step" if self._alike == MOST_ALIKE else ""


def last_step(run_dir: Path) -> int | None:
    """The last step with a log line at the end of metrics.jsonl; None: there is none, or it is on another host."""
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, LookupError, TypeError):  # a partial line of a killed run
                event = json.loads(line)
                if event["event"] == "train":  # evaluations may be of earlier steps
                    return int(event["step"])
    return None


def split(request: Request) -> tuple[Request, Request]:
    """The job that trains, and the one that evaluates, on the last slots. UserError where no rank is left to train."""
    count = request.settings.validation_ranks
    training = (request.ranks or 0) - count
    if training < 1:
        raise UserError(
            f"--validation-ranks {count}: of {request.ranks} ranks none is left to train; give -np {count + 1} or more"
        )
    names = hosts_of_ranks(request.hosts, training + count)
    last = tuple(Host(name, slots) for name, slots in Counter(names[training:]).items())
    before = Beside(names[:training].count(last[0].name), 0)
    after = Beside(0, names[training:].count(names[training - 1]))
    trains, hosts = {BESIDE: json.dumps(after)}, first_slots(request.hosts, training)
    evaluate = ("validate", "--run-dir", str(request.run_dir))
    return (
        replace(request, ranks=training, hosts=hosts, variables=trains),
        replace(request, ranks=count, hosts=last, variables={BESIDE: json.dumps(before)}, command=evaluate),
    )


def _words_of(validation: Request) -> list[str]:
    hosts = ",".join(f"{host.name}:{host.slots}" for host in validation.hosts)
    return [sys.executable, *ISOLATED, "-m", "hvd_cifar.launch", "-H", hosts, *validation.command]


@contextlib.contextmanager
def _running(validation: Request) -> Iterator[None]:
    """Run the job that evaluates during the block. None of its processes is left after it."""
    process = subprocess.Popen(
        _words_of(validation),
        # Without HOROVOD_TIMELINE: the file is that of the training ranks.
        env={k: v for k, v in os.environ.items() if k != "HOROVOD_TIMELINE"} | {**validation.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches training only, at whose end this job stops
        preexec_fn=signalled_with_parent(signal.SIGTERM),
    )
    is_over = threading.Event()

    def tell_of_end() -> None:
        assert process.stderr
        said, code = process.stderr.read(), process.wait()
        if not is_over.is_set():
            write(2, said)
            complain(f"validation ranks have ended (exit code {code}); training goes on, later evaluations are missing")

    reader = threading.Thread(target=tell_of_end, daemon=True)
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
