"""An elastic job under random faults: time without a step, steps made twice, and the weights that it ends with.

    python -m benchmarks.recovery --data-dir D --faults 20

Faults: SIGKILL of a rank, of all ranks, and of their starter (mpirun); SIGSTOP of a rank; fewer slots, more slots. Each
comes at a random moment after the job has made a step, also while ranks are started again. With --virtual-shards the
weights at the end must be those of a job without faults, to the bit. The host is this machine; its slots stand in a
hostfile.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil

from benchmarks import jobs, runs, setting
from hvd_cifar.errors import UserError

SECONDS_WITHOUT_A_STEP = 180
STALL_SECONDS = 5  # without progress, after which the ranks look for one that hangs
KILL_RANK, KILL_RANKS, KILL_STARTER = "SIGKILL of a rank", "SIGKILL of all ranks", "SIGKILL of the starter"
STOP_RANK, LEAVE, JOIN = "SIGSTOP of a rank", "slots leave", "slots come"


class Followed:
    """The numbers in the lines of a growing file, one a line. If the file is cut, reading goes on at its new end."""

    def __init__(self, path: Path, pattern: str) -> None:
        """`pattern`: of bytes, with the number as its group."""
        self.path = path
        self.pattern = re.compile(pattern.encode(), re.MULTILINE)
        self.numbers: list[int] = []
        self._read = 0

    def look(self) -> list[int]:
        """The numbers so far."""
        if not self.path.exists():
            return self.numbers
        self._read = min(self._read, self.path.stat().st_size)
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole + end)
        self.numbers += map(int, self.pattern.findall(whole))
        return self.numbers


@dataclass
class Soak:
    """A job and what has been done to it.

    hosts: hostfile of the job.
    sizes: the numbers of ranks that the job can have.
    noticed, outages: seconds from the fault to the launcher's line if it was seen, and without a step, by fault.
    repeated: for each fault, the steps that were made a second time.
    """

    job: Any
    folder: Path
    hosts: Path
    sizes: Sequence[int]
    chance: random.Random
    noticed: dict[str, list[float]] = field(default_factory=dict)
    outages: dict[str, list[float]] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = Followed(self.folder / "run" / "metrics.jsonl", r'^\{.*"event": "train".*"step": (\d+)')
        self.starts = Followed(self.folder / "log", r"^resumed from .* at step (\d+)$")
        self.lines = Followed(
            self.folder / "log", r"^hvd_cifar: (?:elastic: .*?|exit code |\S+ was ended by signal )(\d+)"
        )

    @property
    def step(self) -> int:
        """The newest step so far."""
        return max(self.steps.look()[-1:], default=0)

    def fault(self) -> None:
        """Cause a random fault, and wait until the job has made a new step."""
        now = int(self.hosts.read_text().partition("=")[2])
        ranks, starter = self._processes()
        kinds = [KILL_RANK, KILL_STARTER] + [KILL_RANKS, STOP_RANK] * (len(ranks) > 1)
        fewer, more = ([n for n in self.sizes if (n - now) * sign > 0] for sign in (-1, 1))
        if len(ranks) == now:  # no slot is cooling down
            kinds += [LEAVE] * bool(fewer) + [JOIN] * bool(more)
        kind = self.chance.choice(kinds)
        starts, lines = len(self.starts.look()), len(self.lines.look())
        began = last = time.monotonic()
        newest = self.step
        if kind in (LEAVE, JOIN):
            self.hosts.write_text(f"localhost slots={self.chance.choice(fewer if kind == LEAVE else more)}\n")
        else:
            targets = {KILL_RANKS: ranks, KILL_STARTER: [starter]}.get(kind, [self.chance.choice(ranks)])
            for process in targets:
                with suppress(psutil.NoSuchProcess):  # the others have ended it
                    process.send_signal(signal.SIGSTOP if kind == STOP_RANK else signal.SIGKILL)
        noticed, end = None, began + SECONDS_WITHOUT_A_STEP
        while len(self.starts.look()) == starts:
            now_at = self.step
            if now_at > newest:
                newest, last = now_at, time.monotonic()
            if noticed is None and len(self.lines.look()) > lines:
                noticed = time.monotonic() - began
            self._check(end)
        resumed = self.starts.numbers[-1]
        while self.step <= max(resumed, newest):
            self._check(end)
        self.outages.setdefault(kind, []).append(time.monotonic() - last)
        self.noticed.setdefault(kind, []).extend([] if noticed is None else [noticed])
        self.repeated.append(max(0, newest - resumed))

    def wait_for_steps(self, steps: int) -> None:
        """Wait until the job has made some more steps."""
        goal, end = self.step + steps, time.monotonic() + SECONDS_WITHOUT_A_STEP
        while self.step < goal:
            self._check(end)

    def _check(self, end: float) -> None:
        time.sleep(0.02)
        if self.job.poll() is not None or time.monotonic() > end:
            raise UserError("the job ended, or makes no step: give --keep, and see its log")

    def _processes(self) -> tuple[list[psutil.Process], psutil.Process]:
        """The ranks, and the process that starts them; one rank alone is both."""
        end = time.monotonic() + SECONDS_WITHOUT_A_STEP
        while True:
            for starter in psutil.Process(self.job.pid).children():
                with suppress(psutil.Error):  # one that ends now
                    if "train" in starter.cmdline():
                        found = [p for p in starter.children(recursive=True) if "hvd_cifar" in p.cmdline()]
                        return found or [starter], starter
            self._check(end)


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--dataset", default="cifar10")
@click.option("--data-dir", default="~/.cache/hvd_cifar/data")
@click.option("--model", default="resnet20")
@click.option("--ranks", default=4, type=click.IntRange(2), help="Ranks at the start, and at most.")
@click.option("--faults", default=10, type=click.IntRange(1))
@click.option("--steps", default=1000, type=click.IntRange(10), help="Steps of the job.")
@click.option("--batch", default=128, help="Global batch size.")
@click.option("--every", default=1000, type=click.IntRange(1), help="Steps between evaluations, and checkpoints.")
@click.option("--virtual-shards", type=int)
@click.option("--seed", type=int, help="Seed of faults and moments.")
@click.option("--keep", type=Path, help="Folder for the runs; without it they are removed.")
@setting.one_line_for_users()
def main(**given: Any) -> None:
    """Run the job, disturb it, and print."""
    jobs.end_on_signals()
    with setting.folder_of(given["keep"]) as folder:
        _disturb(SimpleNamespace(**given), folder)


def _disturb(given: Any, folder: Path) -> None:
    seed = random.randrange(1000) if given.seed is None else given.seed
    options: list[Any] = ["--dataset", given.dataset, "--data-dir", given.data_dir, "--model", given.model]
    options += ["--global-batch-size", given.batch, "--checkpoint-every", given.every, "--eval-every", given.every]
    options += ["--log-every", 1, "--stall-seconds", STALL_SECONDS, "--max-steps", given.steps]
    options += ["--virtual-shards", given.virtual_shards] if given.virtual_shards else []

    hosts = folder / "hosts"
    hosts.write_text(f"localhost slots={given.ranks}\n")
    words: list[Any] = [sys.executable, "-m", "hvd_cifar.launch", "--elastic", f"1:{given.ranks}", "--cool-down", "2:2"]
    words += ["--hostfile", hosts, "train", *options, "--run-dir", folder / "run"]
    sizes = [n for n in range(1, given.ranks + 1) if not given.virtual_shards or given.virtual_shards % n == 0]
    job = jobs.start([str(word) for word in words], folder / "log")
    soak = Soak(job, folder, hosts, sizes, random.Random(seed))
    try:
        soak.wait_for_steps(5)
        while len(soak.repeated) < given.faults:
            soak.fault()
            time.sleep(soak.chance.random() * 2)
            print(f"fault {len(soak.repeated)}: step {soak.step}", file=sys.stderr)
        code = job.wait()
    finally:
        jobs.kill(job)
    _print(soak, f"{given.model}, up to {given.ranks} ranks, {given.steps} steps of {given.batch}, seed {seed}")
    print(f"exit code {code}; steps on record: {len(runs.losses(folder / 'run'))} of {given.steps}")
    if given.virtual_shards:
        alone = folder / "alone"
        jobs.run(jobs.command(2, *options, "--run-dir", alone), folder / "alone.log")
        digests = [runs.summary(run_dir)["weights_sha256"] for run_dir in (folder / "run", alone)]
        print(f"weights_sha256 {digests[0][:16]}, left alone {digests[1][:16]}")


def _print(soak: Soak, title: str) -> None:
    print(title)
    for kind, found in sorted(soak.outages.items()):
        noticed = soak.noticed[kind]
        seen = f"after {statistics.median(noticed):.1f} s, at most {max(noticed):.1f}" if noticed else "not seen"
        count = f" (n = {len(noticed)})" if 0 < len(noticed) < len(found) else ""
        outage = f"without a step {statistics.median(found):.1f} s, at most {max(found):.1f}"
        print(f"{kind}, n = {len(found)}: told {seen}{count}; {outage}")
    print(f"steps made twice: {sum(soak.repeated)} in {len(soak.repeated)} faults, at most {max(soak.repeated)} each")


if __name__ == "__main__":
    main()
