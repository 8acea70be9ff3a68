"""An elastic job: its ranks start again without lost ranks and hosts, and with added ones (`--elastic MIN:MAX`).

Each host keeps the state of the newest step in shared memory (`extensions.elastic_copies`), which outlives the ranks. A
new start therefore loses the step in progress and at most one complete step.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.files import complain
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local, read_hostfile
from hvd_cifar.launch.cluster.network import Participants, Unreachable, running
from hvd_cifar.launch.command import Request, first_slots, make_starter, slots_of
from hvd_cifar.launch.job import Heir, Job
from hvd_cifar.launch.jobs import FINAL, Ends, last_step
from hvd_cifar.launch.output import Lost
from hvd_cifar.runtime.environment import ELASTIC, ElasticJob
from hvd_cifar.runtime.shared_memory import NONE, folder_of, versions_in

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BEFORE_RESIZE = 30.0  # time for a first step, where no rank of this host copies the state
ANSWER_SECONDS = 20.0  # for a host
ALL_SLOTS = 1 << 30


@dataclass
class Roster:
    """Lost slots and hosts, and when they may be used again.

    first, longest: seconds for which a slot or host rests after a loss on its host; each further loss doubles them.
    """

    first: float
    longest: float
    _losses: Counter[str] = field(default_factory=Counter)
    _resting: list[tuple[float, str, int]] = field(default_factory=list)  # end of rest, host, slots

    def lose(self, host: str, whole: bool) -> float:
        """Record the loss of a whole host, or of one rank on it. Return the seconds for which it rests."""
        seconds = min(self.longest, self.first * 2.0 ** self._losses[host])
        self._losses[host] += 1
        self._resting.append((time.monotonic() + seconds, host, ALL_SLOTS if whole else 1))
        return seconds

    def usable(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        """The hosts and slots that do not rest."""
        away = Counter[str]()
        for end, host, slots in self._resting:
            away[host] += slots * (end > time.monotonic())
        return tuple(Host(one.name, left) for one in hosts if (left := one.slots - away[one.name]) > 0)


class ElasticRun:
    """An elastic job, from its first start to its end.

    The first start waits for -np slots, and takes more if they are there. Without -np it waits for the least number of
    ranks, and the ranks that it has take the place of -np: times --batch-size they are the global batch.
    """

    def __init__(self, request: Request, settings: config.TrainSettings) -> None:
        """Raises UserError where the job cannot start."""
        given = request.settings
        assert given.elastic
        self.request, self.settings, self.ranks = request, settings, request.ranks
        self.least, self.most = given.elastic
        self.seconds_to_wait = given.elastic_timeout or 600
        self.roster = Roster(*(given.cool_down or (10, 300)))
        self.way = slurm if request.in_slurm else ssh
        self.folder = folder_of(f"hvd_cifar-{secrets.token_hex(8)}")  # of the copies of the state, on each host
        self.used: set[str] = set()  # hosts that may have a copy of the state
        self.doubted: set[str] = set()  # hosts that were lost or silent, and have not answered since
        self.has_started = False
        self.complaint = ""  # the last printed error of discovery
        if given.hostfile and not given.hostfile.is_file():
            raise UserError(f"--hostfile {given.hostfile}: --elastic reads it again and again: give a file")
        self.check(self.ranks or max(self.fitting(self.most), self.least))
        self.found = self.discover()  # the hosts that it has found last
        slots, needed = slots_of(self.found), self.ranks or self.least
        if not given.hostfile and slots < needed:
            raise UserError(
                f"--elastic {self.least}:{self.most}: {needed} ranks are needed, and the hosts have {slots} slots; "
                "give more, or hosts that may change (--hostfile)"
            )
        self.first = replace(request, ranks=max(self.ranks or 0, self.fitting(slots)))  # it awaits -np
        self.job = Job(can_stop=True)

    def discover(self) -> tuple[Host, ...]:
        """The current hosts. Raises UserError."""
        file = self.request.settings.hostfile
        return read_hostfile(file) if file else self.request.hosts or (Host("localhost", self.most),)

    def check(self, ranks: int) -> None:
        """Raise UserError where the command cannot train on a number of ranks."""
        batch = (self.settings.batch_size or 0) * self.settings.gradient_accumulation * (self.ranks or 0)
        whole = {"global_batch_size": self.settings.global_batch_size or batch or None}
        config.check_ranks(self.settings.model_copy(update=whole), ranks)

    def start(self, hosts: tuple[Host, ...]) -> int:
        """Run the command on hosts, and return its exit code. Raises Unreachable and UserError."""
        named = hosts if self.request.hosts else ()  # (): this machine, which messages do not name
        variables = {ELASTIC: json.dumps(ElasticJob(self.folder.name, self.ranks or 0))}
        now = replace(self.request, ranks=slots_of(hosts), hosts=named, variables=variables)
        return self.job.run(make_starter(now))

    def run(self) -> int:
        """Start ranks until the job ends, and return its exit code. Raises UserError where it cannot start."""
        heir = Heir()
        heir.inherit(shlex.join(["rm", "-rf", str(self.folder)]))
        try:
            return self._run()
        finally:
            self._silent(self.used, f"import shutil; shutil.rmtree({str(self.folder)!r}, True)")
            heir.release(runs=True)

    def _run(self) -> int:
        least, ends = self.ranks or self.least, Ends()
        while True:
            hosts = self._hosts(least)
            if hosts is None:
                return RESUME
            least = self.least
            code, lost = self._run_on(hosts)
            if self.job.asked or code in FINAL and code != RESUME:
                return code
            is_resized = code == RESUME and self.job.stops  # stopped by `_watch` to add or remove ranks: no failure
            if not is_resized:
                ends.add(self._newest_step())
            if reason := ends.why_no_other_start(self.job.tail):
                complain(f"exit code {code}; the job does not start again: {reason}")
                return code
            for one in lost:
                self._lose(one, code)
            if not lost and not is_resized:
                complain(f"elastic: exit code {code}; all start again")

    def _run_on(self, hosts: tuple[Host, ...]) -> tuple[int, list[Lost]]:
        """Run ranks on hosts until they end. Return the exit code, and the lost ranks and hosts."""
        self.ranks = self.ranks or slots_of(hosts)
        self.used |= {host.name for host in hosts}
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=[hosts, ended], daemon=True)
        watch.start()
        try:
            code = self.start(hosts)
            self.has_started = True
        except Unreachable as failure:
            complain(str(failure))
            return 1, [Lost(name) for name in failure.hosts]
        except UserError as failure:
            if not self.has_started:
                raise
            complain(str(failure))
            return 1, []
        finally:
            ended.set()
            watch.join(ANSWER_SECONDS)  # the thread hangs if the hostfile's disk does not answer
        of_ranks = hosts_of_ranks(hosts, slots_of(hosts))
        return code, [one if one.rank is None else Lost(of_ranks[one.rank], one.rank) for one in self.job.lost]

    def _lose(self, lost: Lost, code: int) -> None:
        if lost.host not in {host.name for host in self.found}:
            return
        seconds = self.roster.lose(lost.host, whole=lost.rank is None)
        if lost.rank is None:
            self.doubted.add(lost.host)
        what = lost.host if lost.rank is None else f"rank {lost.rank} on {lost.host}"
        complain(f"elastic: {what} is lost (exit code {code}); it rests for {seconds:g} s")

    def _hosts(self, least: int) -> tuple[Host, ...] | None:
        """The hosts to start on, once they have slots for `least` ranks; None: the time is up, or a signal came."""
        end, told = time.monotonic() + self.seconds_to_wait, False
        while True:
            hosts = self._allowed(self._look())
            there = slots_of(hosts)
            # The rest of a lost host may be over, and the host still away. A start on it would count as a failure.
            if not self._rest_silent(self.doubted & {host.name for host in hosts}):
                if there >= least:
                    return hosts
                if not told:
                    told, until = True, f"waiting up to {self.seconds_to_wait:g} s"
                    complain(f"elastic: {there} ranks are there, and {least} needed; {until}")
            if time.monotonic() > end:
                complain(f"elastic: no {least} ranks within {self.seconds_to_wait:g} s (exit code {RESUME})")
                return None
            if not self.job.wait(SECONDS_BETWEEN_LOOKS):
                return None

    def fitting(self, slots: int) -> int:
        """The largest number of ranks up to `slots` that can train; 0: there is none."""
        for ranks in range(min(slots, self.most), 0, -1):
            with contextlib.suppress(UserError):
                self.check(ranks)
                return ranks
        return 0

    def _allowed(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        return first_slots(hosts, self.fitting(slots_of(hosts)))

    def _look(self) -> tuple[Host, ...]:
        """The usable hosts. If discovery fails, the usable ones of those found last."""
        try:
            self.found = self.discover()
        except UserError as failure:
            if str(failure) != self.complaint:  # once, not every second
                self.complaint = str(failure)
                complain(f"elastic: {failure}; the hosts known so far stay")
        return self.roster.usable(self.found)

    def _watch(self, hosts: tuple[Host, ...], ended: threading.Event) -> None:
        """Ask the ranks to stop, so that the job starts again, when slots are added or withdrawn."""
        began, first_step, seen = 0.0, self._newest_step(), 0
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            if not self.job.runs:  # the hosts are asked first; there is nobody to stop
                continue
            began = began or time.monotonic()
            better = self._allowed(self._look())
            there = {host.name: host.slots for host in self.found}
            withdrawn = [host.name for host in hosts if host.slots > there.get(host.name, 0)]
            more = slots_of(better) > slots_of(hosts)
            seen = seen + 1 if withdrawn or more else 0
            if seen < 2:  # since new hosts rarely appear all at once
                continue
            if self._newest_step() <= first_step and time.monotonic() - began < SECONDS_BEFORE_RESIZE:
                continue
            if more and self._rest_silent({host.name for host in better} - {host.name for host in hosts}):
                seen = 0
                continue
            why = f"{', '.join(withdrawn)} is withdrawn" if withdrawn else "more slots are there"
            self.job.ask(f"elastic: {why}: {slots_of(better)} ranks go on instead of {slots_of(hosts)}")
            return

    def _rest_silent(self, names: set[str]) -> bool:
        """Let those of these hosts rest that do not answer. Return whether there are any."""
        silent = self._silent(names)
        self.doubted = (self.doubted - names) | silent
        for host in sorted(silent):
            complain(f"elastic: {host} does not answer; it rests for {self.roster.lose(host, whole=True):g} s")
        return bool(silent)

    def _silent(self, hosts: Collection[str], program: str = "") -> set[str]:
        """Run a program of Python on these hosts, without this one. Return those that do not answer in time."""
        others = [host for host in hosts if not is_local(host)]
        if not others:
            return set()
        participants, text = Participants(others, "", self.way), f"input()\n{program}\nprint('{{}}')"
        # UserError: there is no ssh here.
        with contextlib.suppress(UserError), running(participants, text, ANSWER_SECONDS) as (_, _, silent):
            return set(silent)
        return set(others)

    def _newest_step(self) -> int:
        """The newest step that this host knows of, from its copy or from metrics.jsonl; -1: there is none."""
        return max([*versions_in(self.folder), last_step(self.request.run_dir) or NONE])
