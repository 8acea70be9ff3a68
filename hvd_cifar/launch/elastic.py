"""An elastic job: its ranks start again without lost ranks and hosts, and with added ones (`--elastic MIN:MAX`).

Each host keeps the state of the newest step in shared memory (`training.state_copy`), which outlives the ranks. A new
start therefore loses the step in progress and at most one complete step.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.launch.cluster import ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local
from hvd_cifar.launch.cluster.network import Unreachable
from hvd_cifar.launch.cluster.remarks import Lost, lost_in
from hvd_cifar.launch.job import Job, complain
from hvd_cifar.launch.restarts import FINAL, STARTS_WITHOUT_A_STEP, is_hopeless, last_step
from hvd_cifar.launch.roster import Roster, Sizes, first_slots, slots_of
from hvd_cifar.runtime.environment import ELASTIC, ElasticJob
from hvd_cifar.runtime.shared_memory import LABEL_BYTES, NONE, folder_of, newest_of, newest_version

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BEFORE_RESIZE = 30.0  # time for a first step, where this host cannot see the steps
ANSWER_SECONDS = 20.0  # for a host

Discover = Callable[[], tuple[Host, ...]]


@dataclass
class ElasticRun:
    """An elastic job from its first start to its end.

    sizes: the numbers of ranks that it may have.
    discover: lists the current hosts.
    start: runs the command on hosts, with additional variables, and returns its exit code; raises Unreachable.
    job: runs what `start` starts.
    ranks: -np; the first start waits for this number of slots, and takes more if they are there. None: it waits for
        the least number of ranks, and the ranks that it has take the place of -np: times --batch-size they are the
        global batch.
    seconds_to_wait: for enough slots.
    cool_down: first and longest rest, for `Roster`.
    batch_size: --batch-size, which limits the ranks to the examples of a micro-batch.
    words: the command line that runs a command on a host; see `Way.words`.
    """

    sizes: Sizes
    discover: Discover
    start: Callable[[tuple[Host, ...], dict[str, str]], int]
    job: Job
    run_dir: Path
    ranks: int | None = None
    seconds_to_wait: float = 600
    cool_down: tuple[float, float] = (10, 300)
    batch_size: int | None = None
    words: Callable[[str, Sequence[str]], list[str]] = ssh.words
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.roster = Roster(*self.cool_down)
        self.found: tuple[Host, ...] | None = None  # None: discovery has not worked yet
        self.used: set[str] = set()  # hosts that may have a copy of the state
        self.doubted: set[str] = set()  # hosts that were lost or silent, and have not answered since
        self.has_started = False
        self.complaint = ""  # the last printed error of discovery
        # Removes this host's copies of the state when its stdin closes: on clean-up, or at any end of this process.
        self.cleaner = subprocess.Popen(
            ["sh", "-c", "trap '' HUP INT TERM USR1; read -r _; exec rm -rf \"$1\"", "sh", str(folder_of(self.name))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self) -> int:
        """Start ranks until the job ends, and return its exit code."""
        least = self.ranks or self.sizes.least
        without_a_step, step = 0, NONE
        while True:
            hosts = self._hosts(least)
            if hosts is None:
                return RESUME
            least = self.sizes.least
            code, lost = self._run_on(hosts)
            if self.job.asked or code in FINAL and code != RESUME or is_hopeless(self.job.tail):
                return code
            gone = {one.host for one in lost if one.rank is None}
            now = self._newest_copy([host.name for host in hosts if host.name not in gone], above=step)
            # `now` may be less: a lost host had a newer copy.
            without_a_step, step = 0 if now > step else without_a_step + 1, now
            if code == RESUME and self.job.stops:  # stopped by `_watch` to add or remove ranks: no failure
                without_a_step = 0
            if without_a_step == STARTS_WITHOUT_A_STEP:
                complain(f"exit code {code}; the job does not start again: {without_a_step} starts made no step")
                return code
            for one in lost:
                self._lose(one, code)
            if not lost and not (code == RESUME and self.job.stops):
                complain(f"elastic: exit code {code}; all start again")

    def clean_up(self) -> None:
        """Remove the copies of the state from this host, and from others that can be reached."""
        assert self.cleaner.stdin
        self.cleaner.stdin.close()
        self._ask(self.used, ["rm", "-rf", str(folder_of(self.name))])
        self.cleaner.wait()

    def _run_on(self, hosts: tuple[Host, ...]) -> tuple[int, list[Lost]]:
        """Run ranks on hosts until they end. Return the exit code, and the lost ranks and hosts."""
        self.ranks = self.ranks or slots_of(hosts)
        if self.batch_size:  # more ranks than examples in a micro-batch cannot start
            most = min(self.sizes.most, self.batch_size * self.ranks)
            self.sizes = replace(self.sizes, most=max(self.sizes.least, most))
        self.used |= {host.name for host in hosts}
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=[hosts, ended], daemon=True)
        watch.start()
        try:
            code = self.start(hosts, {ELASTIC: json.dumps(ElasticJob(self.name, self.ranks))})
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
        found = lost_in(self.job.tail)
        named = [Lost(of_ranks[one.rank], one.rank) if one.rank is not None else one for one in found]
        return code, named

    def _lose(self, lost: Lost, code: int) -> None:
        if lost.host not in {host.name for host in self.found or ()}:
            return
        seconds = self.roster.lose(lost.host, whole=lost.rank is None, now=time.monotonic())
        if lost.rank is None:
            self.doubted.add(lost.host)
        what = lost.host if lost.rank is None else f"rank {lost.rank} on {lost.host}"
        how = "" if lost.rank is None else f" (exit code {code})"
        then = f"it rests for {seconds:g} s, and the others go on" if seconds else "all start again"
        complain(f"elastic: {what} is lost{how}; {then}")

    def _hosts(self, least: int) -> tuple[Host, ...] | None:
        """The hosts to start on, once they have slots for `least` ranks; None: the time is up, or a signal came."""
        end, told = time.monotonic() + self.seconds_to_wait, False
        while True:
            usable = self._look()
            hosts = self._allowed(usable)
            # The rest of a lost host may be over, and the host still away. Starts on it would count as failures. It is
            # asked again and again, so that a job that needs it goes on as soon as it is back.
            while silent := self._silent(self.doubted & {host.name for host in hosts}):
                usable = tuple(host for host in usable if host.name not in silent)
                hosts = self._allowed(usable)
            if slots_of(hosts) >= least:
                return hosts
            if not told:
                told = True
                complain(
                    f"elastic: {slots_of(hosts)} ranks are there, and {least} needed; "
                    f"waiting up to {self.seconds_to_wait:g} s"
                )
            if time.monotonic() > end:
                complain(f"elastic: no {least} ranks within {self.seconds_to_wait:g} s (exit code {RESUME})")
                return None
            if not self.job.wait(SECONDS_BETWEEN_LOOKS):
                return None

    def _allowed(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        return first_slots(hosts, self.sizes.fitting(slots_of(hosts)))

    def _look(self) -> tuple[Host, ...]:
        """The usable hosts. If discovery fails, the usable ones of those found last."""
        try:
            self.found = self.discover()
        except UserError as failure:
            if self.found is None:
                raise
            if str(failure) != self.complaint:  # once, not every second
                self.complaint = str(failure)
                complain(f"elastic: {failure}; the hosts known so far stay")
        return self.roster.usable(self.found, time.monotonic())

    def _watch(self, hosts: tuple[Host, ...], ended: threading.Event) -> None:
        """Ask the ranks to stop, so that the job starts again, when slots are added or withdrawn."""
        began, first_step, seen = 0.0, self._step(), 0
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            if not self.job.runs:  # the hosts are asked first; there is nobody to stop
                continue
            began = began or time.monotonic()
            better = self._allowed(self._look())
            there = {host.name: host.slots for host in self.found or ()}
            withdrawn = [host.name for host in hosts if host.slots > there.get(host.name, 0)]
            more = slots_of(better) > slots_of(hosts)
            seen = seen + 1 if withdrawn or more else 0
            has_begun = self._step() > first_step or time.monotonic() - began > SECONDS_BEFORE_RESIZE
            if seen > 1 and has_begun:  # seen twice, since new hosts rarely appear all at once
                if more and self._lose_silent({host.name for host in better} - {host.name for host in hosts}):
                    seen = 0
                    continue
                why = f"{', '.join(withdrawn)} is withdrawn" if withdrawn else "more slots are there"
                self.job.ask(f"elastic: {why}: {slots_of(better)} ranks go on instead of {slots_of(hosts)}")
                return

    def _lose_silent(self, newcomers: set[str]) -> bool:
        """Let new hosts that do not answer rest, so that ranks do not stop for them. Return whether there are any."""
        silent = self._silent(newcomers)
        for host in sorted(silent):
            seconds = self.roster.lose(host, whole=True, now=time.monotonic())
            complain(f"elastic: {host} does not answer; it rests for {seconds:g} s")
        return bool(silent)

    def _silent(self, names: set[str]) -> set[str]:
        """Those of these hosts that do not answer."""
        silent = {host for host, said in self._ask(names, ["true"]).items() if said is None}
        self.doubted = (self.doubted - names) | silent
        return silent

    def _ask(self, hosts: Collection[str], command: Sequence[str]) -> dict[str, bytes | None]:
        """What a command prints on each of these hosts, without this one; None: it fails, or does not end in time."""
        others = sorted(host for host in hosts if not is_local(host))
        with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
            return dict(zip(others, pool.map(lambda host: self._answer(host, command), others), strict=True))

    def _answer(self, host: str, command: Sequence[str]) -> bytes | None:
        nothing, words = subprocess.DEVNULL, self.words(host, command)
        # OSError: there is no ssh here.
        with (
            contextlib.suppress(OSError),
            subprocess.Popen(
                words, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, start_new_session=True
            ) as process,
        ):
            try:
                said, _ = process.communicate(timeout=ANSWER_SECONDS)
                return said if process.returncode == 0 else None
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return None

    def _step(self) -> int:
        """A number that grows with the newest step that this host can see; -1: there is none."""
        # Either may be old: a host that is no longer used keeps its copy, and another host may write the records.
        return max(newest_version(self._copy), last_step(self.run_dir / "metrics.jsonl") or NONE)

    def _newest_copy(self, hosts: Sequence[str], above: int) -> int:
        """The newest version of the state on this host or, where that is not `above`, on any of `hosts`; -1: none."""
        newest = newest_version(self._copy)
        if newest > above:
            return newest
        said = self._ask(hosts, ["head", "-c", str(LABEL_BYTES), str(self._copy)]).values()
        return max([newest, *(newest_of((label or b"")[-LABEL_BYTES:]) for label in said)])  # after a login's text

    @property
    def _copy(self) -> Path:
        return folder_of(self.name) / "state"
