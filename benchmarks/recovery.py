"""An elastic job under random faults: time without a step, steps made twice, and the weights that it ends with.

    python -m benchmarks.recovery --data-dir D --faults 20

Faults: SIGKILL of a rank, of all ranks, and of their starter (mpirun); SIGSTOP of a rank; fewer slots, more slots. Each
comes at a random moment after the job has made a step, also while ranks are started again. With --virtual-shards the
weights at the end must be those of a job without faults, to the bit. The host is this machine; its slots come from the
job's hostfile.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import jobs, runs, setting
from hvd_cifar.errors import UserError

SECONDS_WITHOUT_A_STEP = 180
STALL_SECONDS = 5  # without progress, after which the ranks look for one that hangs
KILL_RANK, KILL_RANKS, KILL_STARTER = "SIGKILL of a rank", "SIGKILL of all ranks", "SIGKILL of the starter"
STOP_RANK, LEAVE, JOIN = "SIGSTOP of a rank", "slots leave", "slots come"


class Soak:
    """A job and what has been done to it: seconds without a step by fault, and the steps that each had made twice."""

    def __init__(self, job: subprocess.Popen[bytes], folder: Path, hosts: Path, sizes: list[int], seed: int) -> None:
        self.job, self.folder, self.hosts, self.sizes = job, folder, hosts, sizes
        self.chance = random.Random(seed)
        self.outages: dict[str, list[float]] = defaultdict(list)
        self.repeated: list[int] = []

    def step(self) -> int:
        """The newest step so far."""
        return max(runs.steps(self.folder / "run")[-1:], default=0)

    def resumed(self) -> list[int]:
        """The step at which each start but the first went on."""
        log = (self.folder / "log").read_text(errors="replace")
        return [int(step) for step in re.findall(r"^resumed from .* at step (\d+)$", log, re.MULTILINE)]

    def fault(self) -> None:
        """Cause a random fault, and wait until the job has made a new step."""
        now = int(self.hosts.read_text().partition("=")[2])
        ranks, starter = self._processes()
        kinds = [KILL_RANK, KILL_STARTER] + [KILL_RANKS, STOP_RANK] * (len(ranks) > 1)
        fewer, more = ([n for n in self.sizes if (n - now) * sign > 0] for sign in (-1, 1))
        if len(ranks) == now:  # no slot is cooling down
            kinds += [LEAVE] * bool(fewer) + [JOIN] * bool(more)
        kind, starts, newest = self.chance.choice(kinds), len(self.resumed()), self.step()
        began = last = time.monotonic()
        if kind in (LEAVE, JOIN):
            self.hosts.write_text(f"localhost slots={self.chance.choice(fewer if kind == LEAVE else more)}\n")
        else:
            targets = {KILL_RANKS: ranks, KILL_STARTER: [starter]}.get(kind, [self.chance.choice(ranks)])
            for process in targets:
                with suppress(psutil.NoSuchProcess):  # the others have ended it
                    process.send_signal(signal.SIGSTOP if kind == STOP_RANK else signal.SIGKILL)
        while len(self.resumed()) == starts:
            if (now_at := self.step()) > newest:
                newest, last = now_at, time.monotonic()
            self._check(began)
        at = self.resumed()[-1]
        while self.step() <= max(at, newest):
            self._check(began)
        self.outages[kind].append(time.monotonic() - last)
        self.repeated.append(max(0, newest - at))

    def _check(self, began: float) -> None:
        time.sleep(0.02)
        if self.job.poll() is not None or time.monotonic() > began + SECONDS_WITHOUT_A_STEP:
            raise UserError("the job ended, or makes no step: give --keep, and see its log")

    def _processes(self) -> tuple[list[psutil.Process], psutil.Process]:
        """The ranks, and the process that starts them; one rank alone is both."""
        began = time.monotonic()
        while True:
            for starter in psutil.Process(self.job.pid).children():
                with suppress(psutil.Error):  # one that ends now
                    if "train" in starter.cmdline():
                        found = [p for p in starter.children(recursive=True) if "hvd_cifar" in p.cmdline()]
                        return found or [starter], starter
            self._check(began)


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", default="~/.cache/hvd_cifar/data")
@click.option("--model", default="resnet20")
@click.option("--ranks", default=4, type=click.IntRange(2), help="Ranks at the start, and at most.")
@click.option("--faults", default=10, type=click.IntRange(1))
@click.option("--steps", default=1000, type=click.IntRange(10), help="Steps of the job.")
@click.option("--batch", default=128, help="Global batch size.")
@click.option("--virtual-shards", type=int)
@click.option("--seed", type=int, default=0, help="Seed of faults and moments.")
@click.option("--keep", type=Path, help="Folder for the runs; without it they are removed.")
@setting.one_line_for_users()
def main(
    keep: Path | None,
    data_dir: str,
    model: str,
    ranks: int,
    faults: int,
    steps: int,
    batch: int,
    virtual_shards: int | None,
    seed: int,
) -> None:
    """Run the job, disturb it, and print."""
    jobs.end_on_signals()
    options: list[Any] = ["--dataset", "cifar10", "--data-dir", data_dir, "--model", model]
    options += ["--global-batch-size", batch, "--checkpoint-every", 1000, "--eval-every", 1000]
    options += ["--log-every", 1, "--stall-seconds", STALL_SECONDS, "--max-steps", steps]
    options += ["--virtual-shards", virtual_shards] if virtual_shards else []
    with setting.folder_of(keep) as folder:
        hosts = folder / "hosts"
        hosts.write_text(f"localhost slots={ranks}\n")
        words = [sys.executable, "-m", "hvd_cifar.launch", "--elastic", f"1:{ranks}", "--cool-down", "2:2"]
        words += ["--hostfile", str(hosts), "train", *map(str, options), "--run-dir", str(folder / "run")]
        sizes = [n for n in range(1, ranks + 1) if not virtual_shards or virtual_shards % n == 0]
        job = jobs.start(words, folder / "log")
        soak = Soak(job, folder, hosts, sizes, seed)
        try:
            began = time.monotonic()
            while soak.step() < 5:
                soak._check(began)
            while len(soak.repeated) < faults:
                soak.fault()
                time.sleep(soak.chance.random() * 2)
                print(f"fault {len(soak.repeated)}: step {soak.step()}", file=sys.stderr)
            code = job.wait()
        finally:
            jobs.kill(job)
        print(f"{model}, up to {ranks} ranks, {steps} steps of {batch}, seed {seed}\n")
        print("| fault | seconds without a step: median | worst | n |\n|---|---|---|---|")
        for kind, found in sorted(soak.outages.items()):
            print(f"| {kind} | {statistics.median(found):.1f} | {max(found):.1f} | {len(found)} |")
        print(f"\nsteps made twice: {sum(soak.repeated)} in {faults} faults, at most {max(soak.repeated)} each")
        print(f"exit code {code}; steps on record: {len(runs.losses(folder / 'run'))} of {steps}")
        if virtual_shards:
            alone = folder / "alone"
            jobs.run(jobs.command(2, *options, "--run-dir", alone), folder / "alone.log")
            digests = [runs.summary(run_dir)["weights_sha256"] for run_dir in (folder / "run", alone)]
            print(f"weights_sha256 {digests[0][:16]}, left alone {digests[1][:16]}")


if __name__ == "__main__":
    main()
