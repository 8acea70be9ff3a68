"""An elastic job under random faults: time without a step, steps made twice, and the weights that it ends with.

    python -m benchmarks.recovery --data-dir D --faults 20

Faults: SIGKILL of a rank, SIGKILL of what starts the ranks, fewer slots, more slots. Each comes at a random moment
after the job has made a step. With --virtual-shards the weights at the end have to be those of a job that is left
alone, to the bit. The host is this machine; its slots come from a discovery script.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import jobs, runs, setting
from hvd_cifar.errors import UserError

SECONDS_WITHOUT_A_STEP = 180
KILL_RANK, KILL_STARTER, LEAVE, JOIN = "SIGKILL of a rank", "SIGKILL of the starter", "slots leave", "slots come"


@dataclass
class Soak:
    """A job and what has been done to it.

    slots: file from which the discovery script reads the number of slots.
    outages: seconds without a step, by fault.
    repeated: for each fault, the steps that were made a second time.
    memory: bytes of the launcher after each fault.
    """

    job: Any
    folder: Path
    slots: Path
    most: int
    chance: random.Random
    outages: dict[str, list[float]] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The newest step on record."""
        return max(runs.losses(self.folder / "run"), default=0)

    @property
    def starts(self) -> list[int]:
        """The steps from which the job went on."""
        said = (self.folder / "log").read_text(errors="replace")
        return [int(step) for step in re.findall(r"^resumed from .* at step (\d+)$", said, re.MULTILINE)]

    def fault(self) -> None:
        """Do something to the job, and wait until it has made a new step."""
        now = int(self.slots.read_text())
        kinds = [KILL_RANK, KILL_STARTER] + [LEAVE] * (now > 1) + [JOIN] * (now < self.most)
        kind = self.chance.choice(kinds)
        starts = len(self.starts)
        if kind in (LEAVE, JOIN):
            self.slots.write_text(str(self.chance.randrange(1, now) if kind == LEAVE else now + 1))
        else:
            ranks, starter = self._processes()
            (self.chance.choice(ranks) if kind == KILL_RANK else starter).kill()
        began = last = time.monotonic()
        newest = self.step
        end = began + SECONDS_WITHOUT_A_STEP
        while len(self.starts) == starts:
            now_at = self.step
            if now_at > newest:
                newest, last = now_at, time.monotonic()
            self._check(end)
        resumed = self.starts[-1]
        while self.step <= max(resumed, newest):
            self._check(end)
        self.outages.setdefault(kind, []).append(time.monotonic() - last)
        self.repeated.append(max(0, newest - resumed))
        self.memory.append(psutil.Process(self.job.pid).memory_info().rss)

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
        starter = psutil.Process(self.job.pid).children()[0]
        found = [p for p in starter.children(recursive=True) if "hvd_cifar" in p.cmdline()]
        return found or [starter], starter


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--dataset", default="cifar10")
@click.option("--data-dir", default="~/.cache/hvd_cifar/data")
@click.option("--model", default="resnet20")
@click.option("--ranks", default=4, type=click.IntRange(2), help="The most, and those at the start.")
@click.option("--faults", default=10, type=click.IntRange(1))
@click.option("--steps", default=1000, type=click.IntRange(10), help="At which the job ends.")
@click.option("--batch", default=128, help="Global batch size.")
@click.option("--virtual-shards", type=int)
@click.option("--gloo", is_flag=True)
@click.option("--seed", type=int, help="Of faults and moments.")
@click.option("--keep", type=Path, help="Folder for the runs; without it they are thrown away.")
@click.pass_context
@setting.one_line_for_users()
def main(
    context: click.Context,
    dataset: str,
    data_dir: str,
    model: str,
    ranks: int,
    faults: int,
    steps: int,
    batch: int,
    virtual_shards: int | None,
    gloo: bool,
    seed: int | None,
    keep: Path | None,
) -> None:
    """Run the job, disturb it, and print."""
    jobs.end_on_sigterm()
    folder = keep or Path(context.with_resource(tempfile.TemporaryDirectory()))
    folder.mkdir(parents=True, exist_ok=True)
    seed = random.randrange(1000) if seed is None else seed
    options: list[Any] = ["--dataset", dataset, "--data-dir", data_dir, "--model", model, "--log-every", 1]
    options += ["--global-batch-size", batch, "--checkpoint-every", 10**6, "--eval-every", 0, "--max-steps", steps]
    options += ["--virtual-shards", virtual_shards] if virtual_shards else []

    slots, find = folder / "slots", folder / "discover.sh"
    slots.write_text(str(ranks))
    find.write_text(f'#!/bin/sh\necho "localhost:$(cat {slots})"\n')
    find.chmod(0o755)
    launcher: list[Any] = ["--elastic", f"1:{ranks}", "--host-discovery-script", find, "--cool-down", "2:2"]
    launcher += ["--gloo"] * gloo
    soak = Soak(_start(folder, launcher, options), folder, slots, ranks, random.Random(seed))
    try:
        soak.wait_for_steps(5)
        while len(soak.repeated) < faults:
            soak.fault()
            time.sleep(soak.chance.random() * 2)
            print(f"fault {len(soak.repeated)}: step {soak.step}", file=sys.stderr)
        code = soak.job.wait()
    finally:
        jobs.kill(soak.job)
    _print(soak, f"{model}, up to {ranks} ranks, {'Gloo' if gloo else 'MPI'}, {steps} steps of {batch}, seed {seed}")
    print(f"exit code {code}; steps on record: {len(runs.losses(folder / 'run'))} of {steps}")
    if virtual_shards:
        alone = folder / "alone"
        jobs.run(jobs.command(2, *options, "--run-dir", alone), folder / "alone.log")
        digests = [runs.summary(run_dir)["weights_sha256"] for run_dir in (folder / "run", alone)]
        print(f"weights_sha256 {digests[0][:16]}, left alone {digests[1][:16]}")


def _start(folder: Path, launcher: list[Any], options: list[Any]) -> Any:
    words = [sys.executable, "-m", "hvd_cifar.launch", *launcher, "train", *options, "--run-dir", folder / "run"]
    return jobs.start([str(word) for word in words], folder / "log")


def _print(soak: Soak, title: str) -> None:
    print(title)
    for kind, found in sorted(soak.outages.items()):
        times = f"median {statistics.median(found):.1f} s, worst {max(found):.1f} s, n = {len(found)}"
        print(f"without a step after {kind}: {times}")
    print(f"steps made twice: {sum(soak.repeated)} in {len(soak.repeated)} faults, at most {max(soak.repeated)} each")
    first, last = (statistics.median(part) / 2**20 for part in (soak.memory[:5], soak.memory[-5:]))
    print(f"memory of the launcher: {first:.1f} MiB after the first faults, {last:.1f} MiB after the last ones")


if __name__ == "__main__":
    main()
