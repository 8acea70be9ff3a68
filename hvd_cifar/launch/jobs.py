"""Jobs of ranks: one start, restarts of what failed, or an elastic job; validation ranks beside each."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.launch import preflight, validators
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local
from hvd_cifar.launch.elastic import ElasticRun, Options
from hvd_cifar.launch.here import cores_here, is_for_gpus
from hvd_cifar.launch.job import Job, complain, write
from hvd_cifar.launch.request import Request
from hvd_cifar.launch.restarts import FINAL, Failure, failure_of, reason_to_give_up, seconds_before
from hvd_cifar.launch.roster import Sizes, slots_of
from hvd_cifar.launch.start import as_typed, leave_terminal, make_ready, start
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.stalls import FLOOR

ELASTIC_TIMEOUT, COOL_DOWN = 600, (10, 300)  # s


def launch(request: Request, ranks: int, stall_seconds: float) -> int:
    """Run a job of this number of ranks; `stall_seconds`: as of `Job`. Returns its exit code."""
    ready = make_ready(request, ranks)
    if request.settings.dry_run:
        write(1, os.fsencode(f"{as_typed(ready.words, ready.env)}\n"))
        if request.validators:
            write(1, os.fsencode(f"{shlex.join(validators.words(request))}\n"))
        return 0
    if ready.words[0] == sys.executable and not ready.proof and not request.validators:
        os.execve(ready.words[0], ready.words, ready.env)

    cores, all_ranks = cores_here(), ranks + request.settings.validation_ranks
    if all_ranks > cores and not ready.hosts:
        complain(f"note: {all_ranks} ranks share {cores} core{'s' * (cores > 1)}: results are right, but slow")
    job = Job(can_stop=request.command[0] == "train", stall_seconds=stall_seconds)
    with validators.beside(request, hosts_of_ranks(request.hosts, ranks)):
        code = start(ready, job)
        if request.settings.max_restarts:
            ready = replace(ready, words=[*ready.words, *request.of_restarts])
            code = _restart(code, request, job, lambda: start(ready, job))
    leave_terminal(ranks, code)
    return code


def _restart(code: int, request: Request, job: Job, start: Callable[[], int]) -> int:
    """Restart a failed job until it succeeds, is stopped or is given up. Return its exit code."""
    failures: list[Failure] = []
    run_dir = None if request.is_program else request.run_dir
    while code not in FINAL and not job.asked:
        failures.append(failure_of(code, job.tail, run_dir))
        if reason := reason_to_give_up(failures, request.settings.max_restarts):
            complain(f"exit code {code}; the job does not start again: {reason}")
            return code
        seconds = seconds_before(len(failures))
        complain(
            f"exit code {code}; restart {len(failures)} of {request.settings.max_restarts} in {seconds:g} s, "
            + ("from its own checkpoints" if run_dir is None else f"from the newest checkpoint in {run_dir}")
        )
        if not job.wait(seconds):
            return RESUME
        code = start()
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
    timeout = request.settings.elastic_timeout or ELASTIC_TIMEOUT
    options = Options(sizes, request.ranks, timeout, request.settings.cool_down or COOL_DOWN, settings.batch_size)
    if request.settings.validation_ranks:
        request = validators.set_apart_elastic(request)
    hosts, least = request.hosts or (Host("localhost", sizes.most),), request.ranks or sizes.least
    if not request.discover and slots_of(hosts) < least:
        raise UserError(
            f"{asked}: {least} ranks are needed, and the hosts have {slots_of(hosts)} slots"
            f"{' beside the validation ranks' * bool(request.settings.validation_ranks)}; give more, or hosts that "
            "may change (--hostfile, --host-discovery-script)"
        )
    # Without validation ranks a script is asked for hosts only when the job starts.
    known = bool(request.hosts or not request.discover)
    awaited = request.ranks or 0  # by the first start, if they are not there yet
    ranks = max(awaited, sizes.fitting(slots_of(hosts))) if known or not awaited else awaited
    if request.settings.dry_run:
        return launch(request, ranks, 0.0)
    if known:
        check_early(request, ranks, settings)
    job = Job(can_stop=True, stall_seconds=stall_seconds_of(settings))
    starts = itertools.count()

    def start_on(chosen: tuple[Host, ...], variables: Mapping[str, str]) -> int:
        is_again = next(starts) > 0
        words = request.command + (request.of_restarts if is_again else ())
        given = chosen if request.hosts or request.discover else ()  # (): this machine, which messages do not name
        now = replace(request, hosts=given, command=words, variables=variables, is_again=is_again)
        return start(make_ready(now, slots_of(chosen)), job)

    way = slurm if request.in_slurm else ssh
    run = ElasticRun(options, request.discover or (lambda: hosts), start_on, job, request.run_dir, way.words)
    try:
        with validators.beside(request, hosts_of_ranks(hosts, ranks)):
            code = run.run()
    finally:
        run.clean_up()
    leave_terminal(2, code)
    return code


def check_early(request: Request, ranks: int, settings: Any) -> None:
    """Raise UserError for errors that can be found before any rank starts."""
    of_ranks = hosts_of_ranks(request.hosts, ranks)
    local = {name: is_local(name) for name in dict.fromkeys(of_ranks)}
    sees_files, on_gpus = local[of_ranks[0]], is_for_gpus()
    preflight.check(settings, ranks, sees_files=sees_files, on_gpus=on_gpus, warn=complain)
    here = sum(local[name] for name in of_ranks) + sum(host.slots for host in request.validators if is_local(host.name))
    preflight.check_memory(here, devices.available_memory(swap=True))


def stall_seconds_of(settings: Any) -> float:
    """How long what starts the ranks may be stopped; 0: for ever. `settings`: of any command."""
    if not isinstance(settings, config.TrainSettings):
        return 0.0
    return FLOOR if settings.stall_seconds is None else settings.stall_seconds
