"""An elastic job: its ranks start again around those that are lost, and with hosts that come (`--elastic MIN:MAX`).

Each host keeps the state of the newest step in shared memory (`training.state_copy`), which outlives the ranks. So a
new start loses at most the step that was under way. It works in the same way over MPI and Gloo.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_cifar.errors import DIVERGED, RESUME, UserError
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, parse_hosts
from hvd_cifar.launch.cluster.network import Unreachable
from hvd_cifar.launch.cluster.remarks import Lost, lost_in
from hvd_cifar.launch.job import Job, complain
from hvd_cifar.launch.restarts import FINAL, last_step
from hvd_cifar.launch.roster import Roster, Sizes, first_slots, slots_of
from hvd_cifar.runtime.environment import ELASTIC, ElasticJob
from hvd_cifar.runtime.shared_memory import NONE, folder_of, newest_step

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BEFORE_RESIZE = 30.0  # after a start whose steps this host cannot see
FAILURES_WITHOUT_A_STEP = 3
SCRIPT_SECONDS = 10.0

Discover = Callable[[], tuple[Host, ...]]


@dataclass(frozen=True)
class Options:
    """Of an elastic job.

    sizes: numbers of ranks.
    ranks: -np: the job first starts with that many, and a batch size of a rank stands for that many; None: as found.
    seconds_to_wait: for enough ranks.
    cool_down: of `Roster`: first and longest.
    """

    sizes: Sizes
    ranks: int | None
    seconds_to_wait: float
    cool_down: tuple[float, float]


@dataclass
class ElasticRun:
    """The life of an elastic job.

    discover: the hosts that there are now.
    start: runs the command on hosts with more variables, and returns its exit code; raises Unreachable.
    job: that `start` runs.
    """

    options: Options
    discover: Discover
    start: Callable[[tuple[Host, ...], dict[str, str]], int]
    job: Job
    run_dir: Path
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.roster = Roster(*self.options.cool_down)
        self.ranks = self.options.ranks or 0  # that a batch size stands for
        self.found: tuple[Host, ...] = ()
        self.used: set[str] = set()  # hosts
        self.has_started = False
        self.complaint = ""  # the last one about discovery
        # Removes this host's copies of the state when it is told to, or when this process ends, even by SIGKILL.
        self.cleaner = subprocess.Popen(
            ["sh", "-c", 'read -r _; exec rm -rf "$1"', "sh", str(folder_of(self.name))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self) -> int:
        """Start ranks until the job ends, and return its exit code."""
        least = self.options.ranks or self.options.sizes.least
        without_a_step, step = 0, NONE
        while True:
            hosts = self._hosts(least)
            if hosts is None:
                return RESUME
            least = self.options.sizes.least
            code, lost = self._run_on(hosts)
            now = self._step()
            without_a_step, step = (0, now) if now > step else (without_a_step + 1, step)
            if code in FINAL and not (code == RESUME and not self.job.asked) or DIVERGED.encode() in self.job.tail:
                return code
            if self.job.asked:
                return code
            if code == RESUME:  # ranks joined, or left as they were asked to
                without_a_step = 0
            if without_a_step == FAILURES_WITHOUT_A_STEP:
                complain(f"exit code {code}; the job does not start again: {without_a_step} starts made no step")
                return code
            for one in lost:
                self._lose(one, code)

    def clean_up(self, others: Iterable[str], words: Callable[[str, Sequence[str]], list[str]]) -> None:
        """Remove the copies of the state from this host and from others, as far as they can be reached.

        `words`: of a `Way`.
        """
        removal = ["rm", "-rf", str(folder_of(self.name))]
        removals = [
            subprocess.Popen(words(host, removal), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for host in others
        ]
        assert self.cleaner.stdin
        self.cleaner.stdin.close()
        removals.append(self.cleaner)
        for process in removals:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SCRIPT_SECONDS)

    def _run_on(self, hosts: tuple[Host, ...]) -> tuple[int, list[Lost]]:
        """Run ranks on hosts to the end; their exit code, and what was lost."""
        self.ranks = self.ranks or slots_of(hosts)
        self.used |= {host.name for host in hosts}
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=[hosts, ended], daemon=True)
        watch.start()
        try:
            code = self._start(hosts, saves_only=False)
        except Unreachable as failure:
            complain(str(failure))
            return RESUME, [Lost(name) for name in failure.hosts]
        except UserError as failure:
            if not self.has_started:
                raise
            complain(str(failure))
            return 1, []
        finally:
            ended.set()
            watch.join()
        of_ranks = hosts_of_ranks(hosts, slots_of(hosts))
        found = lost_in(self.job.tail)
        named = [Lost(of_ranks[one.rank], one.rank) if one.rank is not None else one for one in found]
        return code, named

    def _start(self, hosts: tuple[Host, ...], saves_only: bool) -> int:
        job = ElasticJob(self.name, self.ranks, saves_only)
        code = self.start(hosts, {ELASTIC: str(job)})
        self.has_started = True
        return code

    def _lose(self, lost: Lost, code: int) -> None:
        if lost.host not in {host.name for host in self.found}:
            return
        seconds = self.roster.lose(lost.host, whole=lost.rank is None, now=time.monotonic())
        what = lost.host if lost.rank is None else f"rank {lost.rank} on {lost.host}"
        how = "" if lost.rank is None else f" (exit code {code})"
        then = f"it rests for {seconds:g} s, and the others go on" if seconds else "all start again"
        complain(f"elastic: {what} is lost{how}; {then}")

    def _hosts(self, least: int) -> tuple[Host, ...] | None:
        """The hosts to start on, as soon as they have slots for `least` ranks; None: in vain, or a signal came."""
        end, told = time.monotonic() + self.options.seconds_to_wait, False
        while True:
            hosts = self._allowed(self._look())
            if slots_of(hosts) >= least:
                return hosts
            if not told:
                told = True
                complain(
                    f"elastic: {slots_of(hosts)} ranks are there, and {least} needed; "
                    f"waiting up to {self.options.seconds_to_wait:g} s"
                )
                self._save(hosts)
            if time.monotonic() > end:
                complain(f"elastic: no {least} ranks within {self.options.seconds_to_wait:g} s (exit code {RESUME})")
                return None
            if not self.job.wait(SECONDS_BETWEEN_LOOKS):
                return None

    def _save(self, hosts: tuple[Host, ...]) -> None:
        """Write the newest state to disk while the job waits."""
        if not self.used:
            return
        # One rank on each host that may have it.
        everywhere = tuple(Host(host.name, 1) for host in self.found if host.name in self.used)
        chosen = tuple(host for host in everywhere if host.name in {h.name for h in hosts}) or everywhere
        try:
            self._start(self._allowed(chosen), saves_only=True)
        except UserError as failure:
            complain(f"elastic: the newest state is not saved: {failure}")

    def _allowed(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        return first_slots(hosts, self.options.sizes.fitting(slots_of(hosts)))

    def _look(self) -> tuple[Host, ...]:
        """The usable hosts; where they cannot be found, those that were found last."""
        try:
            self.found = self.discover()
        except UserError as failure:
            if not self.found:
                raise
            if str(failure) != self.complaint:  # once, not every second
                self.complaint = str(failure)
                complain(f"elastic: {failure}; the hosts known so far stay")
        return self.roster.usable(self.found, time.monotonic())

    def _watch(self, hosts: tuple[Host, ...], ended: threading.Event) -> None:
        """Ask ranks to stop at a step where more of them could go on, or a host is withdrawn."""
        began, first_step, seen = time.monotonic(), self._step(), 0
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            better = self._allowed(self._look())
            there = {host.name: host.slots for host in self.found}
            withdrawn = [host.name for host in hosts if host.slots > there.get(host.name, 0)]
            more = slots_of(better) > slots_of(hosts)
            seen = seen + 1 if withdrawn or more else 0
            has_begun = self._step() > first_step or time.monotonic() - began > SECONDS_BEFORE_RESIZE
            if seen > 1 and has_begun:  # twice the same: hosts are seldom listed at the same instant
                why = f"{', '.join(withdrawn)} is withdrawn" if withdrawn else "more slots are there"
                self.job.ask(f"elastic: {why}: {slots_of(better)} ranks go on instead of {slots_of(hosts)}")
                return

    def _step(self) -> int:
        """The newest step that this host knows of; -1: none."""
        copied = newest_step(folder_of(self.name) / "state")
        return copied if copied != NONE else last_step(self.run_dir / "metrics.jsonl") or NONE


def script(path: Path) -> Discover:
    """Discovery by a program that prints lines `HOST:SLOTS`, as for horovodrun."""

    def discover() -> tuple[Host, ...]:
        what = f"--host-discovery-script {path}"
        try:
            done = subprocess.run([str(path)], capture_output=True, text=True, timeout=SCRIPT_SECONDS)
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as failure:
            raise UserError(f"{what}: {failure}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise UserError(f"{what}: exit code {done.returncode}{': ' + said[-1] if said else ''}")
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if not lines:
            return ()
        try:
            return parse_hosts(",".join(lines))
        except UserError as failure:
            raise UserError(f"{what}: {str(failure).partition(': ')[2]}") from None

    return discover
