"""A job on the same hosts to its end: one start, restarts (`--max-restarts`), and validation ranks beside it.

Validation ranks (`--validation-ranks K`) are a second job on the last K slots, which evaluates during training. It has
a launcher process of its own, as if a user had started it. Its failures therefore do not affect the training ranks,
whose collectives are those of a run without validation ranks.
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
STARTS_WITHOUT_A_STEP = 3  # in a row, after which a job does not start again
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
            code = _restart(code, request, job, replace(starter, words=[*starter.words, *request.of_restarts]))
    return code


def _restart(code: int, request: Request, job: Job, starter: Starter) -> int:
    """Restart a failed job until it succeeds, is stopped or is given up. Return its exit code."""
    most, restart, alike, step = request.settings.max_restarts, 0, 0, None
    while code not in FINAL and not job.asked:
        now = None if request.is_program else last_step(request.run_dir)
        if now is None or now != step:
            alike, step = 0, now
        alike += bool(job.last_words)  # else no rank ran: a host may be booting
        reason = f"--max-restarts {most}" if restart == most else ""
        if step is not None and alike == STARTS_WITHOUT_A_STEP:
            reason = f"{alike} starts in a row ended after step {step}"
        if is_hopeless(job.tail):
            reason = "it would fail in the same way"
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


def is_hopeless(tail: bytes) -> bool:
    """Whether another start would fail in the same way, by the end of a job's stderr."""
    return DIVERGED.encode() in tail or OUT_OF_SYNC.encode() in tail


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
