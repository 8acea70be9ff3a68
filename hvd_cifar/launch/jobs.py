"""Jobs of ranks: one start, restarts of what failed, or an elastic job; validation ranks beside each."""

from __future__ import annotations

import itertools
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.launch import validators
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local
from hvd_cifar.launch.command import as_typed, leave_terminal, make_starter
from hvd_cifar.launch.elastic import ElasticRun
from hvd_cifar.launch.here import cores_here, is_for_gpus
from hvd_cifar.launch.job import Job, Starter, complain, write
from hvd_cifar.launch.request import Request
from hvd_cifar.launch.restarts import FINAL, STARTS_WITHOUT_A_STEP, is_hopeless, last_said, last_step, seconds_before
from hvd_cifar.launch.roster import Sizes, slots_of
from hvd_cifar.runtime import devices

# Peak of a rank's own memory (USS) in the smallest run: tutorial, batch 1, one thread, 2 ranks: 303 MiB. `fast` takes
# 874 MiB.
LEAST_BYTES_OF_A_RANK = 300 << 20


def launch(request: Request, ranks: int) -> int:
    """Run a job of this number of ranks, and return its exit code."""
    starter = make_starter(request, ranks)
    if request.settings.dry_run:
        write(1, os.fsencode(f"{as_typed(starter)}\n"))
        if request.validators:
            write(1, os.fsencode(f"{shlex.join(validators.words(request))}\n"))
        return 0
    if starter.is_rank and not (starter.proof or request.validators or request.settings.max_restarts):
        os.execve(starter.words[0], starter.words, starter.env)

    cores, all_ranks = cores_here(), ranks + request.settings.validation_ranks
    if all_ranks > cores and not starter.hosts:
        complain(f"note: {all_ranks} ranks share {cores} core{'s' * (cores > 1)}: results are right, but slow")
    job = Job(can_stop=request.command[0] == "train")
    with validators.beside(request, hosts_of_ranks(request.hosts, ranks)):
        code = job.run(starter)
        if request.settings.max_restarts:
            code = _restart(code, request, job, replace(starter, words=[*starter.words, *request.of_restarts]))
    leave_terminal(ranks, code)
    return code


def _restart(code: int, request: Request, job: Job, starter: Starter) -> int:
    """Restart a failed job until it succeeds, is stopped or is given up. Return its exit code."""
    most, restart, alike, step = request.settings.max_restarts, 0, 0, None
    while code not in FINAL and not job.asked:
        now = None if request.is_program else last_step(request.run_dir / "metrics.jsonl")
        if now is None or now != step:
            alike, step = 0, now
        alike += bool(last_said(job.tail))  # else no rank ran: a host may be booting
        reason = f"--max-restarts {most}" if restart == most else ""
        if step is not None and alike == STARTS_WITHOUT_A_STEP:
            reason = f"{alike} starts in a row ended after step {step}"
        if is_hopeless(job.tail):
            reason = "it would fail in the same way"
        if reason:
            complain(f"exit code {code}; the job does not start again: {reason}")
            return code
        restart += 1
        where = "its own checkpoints" if request.is_program else f"the newest checkpoint in {request.run_dir}"
        complain(f"exit code {code}; restart {restart} of {most} in {seconds_before(restart):g} s, from {where}")
        if not job.wait(seconds_before(restart)):
            return RESUME
        code = job.run(starter)
    return code


def launch_elastic(request: Request, settings: config.TrainSettings) -> int:
    """Run an elastic job; see `launch.elastic`."""
    assert request.settings.elastic
    sizes = Sizes(*request.settings.elastic, shards=settings.virtual_shards)
    asked = f"--elastic {sizes.least}:{sizes.most}"
    if sizes.fitting(sizes.most) < sizes.least:
        raise UserError(f"{asked}: no number in between divides --virtual-shards {sizes.shards}")
    if request.ranks:
        config.check_ranks(settings, request.ranks)
    # A rank whose micro-batches would be empty cannot start.
    micro_batches = (settings.global_batch_size or 0) // settings.gradient_accumulation
    if limit := micro_batches or (settings.batch_size or 0) * (request.ranks or 0):
        sizes = replace(sizes, most=max(sizes.least, min(sizes.most, limit)))
    hosts, least = request.hosts or (Host("localhost", sizes.most),), request.ranks or sizes.least
    if not request.discover and slots_of(hosts) < least:
        raise UserError(
            f"{asked}: {least} ranks are needed, and the hosts have {slots_of(hosts)} slots; give more, or hosts that "
            "may change (--hostfile)"
        )
    ranks = max(request.ranks or 0, sizes.fitting(slots_of(hosts)))  # the first start awaits -np
    if request.settings.dry_run:
        return launch(request, ranks)
    check_early(request, ranks, settings)
    job = Job(can_stop=True)
    starts = itertools.count()

    def start_on(chosen: tuple[Host, ...], variables: Mapping[str, str]) -> int:
        is_again = next(starts) > 0
        words = request.command + (request.of_restarts if is_again else ())
        given = chosen if request.hosts else ()  # (): this machine, which messages do not name
        now = replace(request, hosts=given, command=words, variables=variables, is_again=is_again)
        return job.run(make_starter(now, slots_of(chosen)))

    way = slurm if request.in_slurm else ssh
    run = ElasticRun(
        sizes,
        request.discover or (lambda: hosts),
        start_on,
        job,
        request.run_dir,
        ranks=request.ranks,
        seconds_to_wait=request.settings.elastic_timeout or 600,
        cool_down=request.settings.cool_down or (10, 300),
        batch_size=settings.batch_size,
        words=way.words,
    )
    try:
        code = run.run()
    finally:
        run.clean_up()
    leave_terminal(2, code)
    return code


def check_early(request: Request, ranks: int, settings: Any) -> None:
    """Raise UserError for errors that can be found before any rank starts."""
    if isinstance(settings, config.TrainSettings):
        config.check_ranks(settings, ranks)
    if getattr(settings, "precision", None) == "mixed_float16" and not is_for_gpus():
        complain("note: --precision mixed_float16 is slow on a CPU; for speed give mixed_bfloat16 or float32")
    slots = Counter(hosts_of_ranks(request.hosts, ranks)) + Counter({one.name: one.slots for one in request.validators})
    here, available = sum(slots[name] for name in slots if is_local(name)), devices.available_memory(swap=True)
    if here * LEAST_BYTES_OF_A_RANK > available:
        raise UserError(
            f"{here} ranks on this host need at least {here * LEAST_BYTES_OF_A_RANK / 2**30:.1f} GiB of memory, and "
            f"{available / 2**30:.1f} GiB are free: start at most {available // LEAST_BYTES_OF_A_RANK} here (-np)"
        )
