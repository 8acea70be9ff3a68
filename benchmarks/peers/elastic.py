"""This project's elastic jobs beside torchrun's, under the same random faults.

    python -m benchmarks.peers.elastic --data-dir D

Each side trains the tutorial's net for whole epochs in float32, with the same order of the data and global batch. Its
first run has no faults. Then, in each round, the sides train again in a random order, and a rank is killed (SIGKILL) at
random moments, the same for all sides. The next fault waits until the job has all its ranks again. torchrun's snapshots
are made every --every steps; this project keeps a copy of each step.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil

from benchmarks import jobs, setting
from benchmarks.peers import environment, sides
from benchmarks.peers.allocator import VARIABLES
from hvd_cifar.data import sampler
from hvd_cifar.errors import UserError

OURS, TORCHRUN = "hvd_cifar", "torchrun"
MODEL = "tutorial"
PAUSE = 1.0  # seconds: a longer time between two steps is an outage; a step takes a tenth of it
SILENCE = 180.0  # seconds without a step, after which a job is given up
LOOK = 0.02  # seconds between looks at a job


@dataclass(frozen=True)
class Work:
    """What every side does. every: steps between snapshots. folder: of the run."""

    ranks: int
    batch: int
    steps: int
    every: int
    data_dir: Path
    peers_python: Path
    folder: Path

    @property
    def run_dir(self) -> Path:
        """Where the side writes its steps and its summary."""
        return self.folder / "run"


class Side(NamedTuple):
    """name: for the table. words: command for some work. word: argument by which a rank's command line is known."""

    name: str
    words: Callable[[Work], list[Any]]
    word: str


def ours(work: Work) -> list[Any]:
    """This project, with weights that do not depend on the number of ranks."""
    words = [sys.executable, "-m", "hvd_cifar.launch", "-np", work.ranks, "--elastic", f"1:{work.ranks}"]
    words += ["--cool-down", "0:0", "--host-discovery-script", _discovery(work)]
    words += ["train", "--dataset", "cifar10", "--data-dir", work.data_dir, "--model", MODEL, "--log-every", 1]
    words += ["--global-batch-size", work.batch, "--max-steps", work.steps, "--virtual-shards", work.ranks]
    words += ["--checkpoint-every", 10**6, "--eval-every", 0]
    return [*words, "--run-dir", work.run_dir]


def torchrun(work: Work) -> list[Any]:
    """DDP over Gloo; torchrun starts all ranks again, which load the newest snapshot.

    torchrun's agent keeps one store for all starts, so a rank may read the address of a lost one. A variable of PyTorch
    prevents this.
    """
    variables = {**VARIABLES, "OMP_NUM_THREADS": sides.threads_of(work.ranks), "GLOO_SOCKET_IFNAME": "lo"}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = 1
    words: list[Any] = ["env", *(f"{name}={value}" for name, value in variables.items())]
    words += [work.peers_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", work.ranks]
    words += ["--max-restarts", 1000, "-m", "benchmarks.peers.ddp", "--data-dir", work.data_dir, "--model", MODEL]
    words += ["--batch-size", work.batch // work.ranks, "--threads", sides.threads_of(work.ranks), "--log-every", 1]
    return [*words, "--max-steps", work.steps, "--snapshot-every", work.every, "--run-dir", work.run_dir]


def _discovery(work: Work) -> Path:
    path = work.folder / "discover.sh"
    path.write_text(f"#!/bin/sh\necho localhost:{work.ranks}\n")
    path.chmod(0o755)
    return path


SIDES = {
    OURS: Side("hvd_cifar `--elastic`", ours, "hvd_cifar"),
    TORCHRUN: Side("PyTorch DDP, torchrun", torchrun, "benchmarks.peers.ddp"),
}


@dataclass
class Course:
    """The outcome of a side's run.

    Attributes:
        seen: seconds at which its steps were seen.
        faults: seconds at which its ranks were killed.
        twice, lost: steps that were made a second time, and those that were never made.
        digest: of the weights at the end.
        told: the failure, where the run did not come to its end.
    """

    seen: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    twice: int = 0
    lost: int = 0
    digest: str = ""
    told: str = ""

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return self.seen[-1] - self.seen[0] if self.seen else 0.0


class Steps:
    """The steps that a run has on record, read again and again while it runs."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self.made: list[int] = []
        self.seen: list[float] = []
        self._withdrawn = 0  # lines that a run removed when it went on from an earlier step

    def look(self) -> None:
        """Note new steps."""
        text = self._path.read_text() if self._path.exists() else ""
        made = [int(step) for step in re.findall(r'^{"event": "train",.*?"step": (\d+)\b.*}$', text, re.MULTILINE)]
        if len(made) > len(self.made):
            self.seen.append(time.monotonic())
        self._withdrawn += max(0, len(self.made) - len(made))
        self.made = made

    @property
    def twice(self) -> int:
        """Steps that were made again: removed from the record, or twice in it."""
        return self._withdrawn + len(self.made) - len({*self.made})


def outages(seen: Sequence[float], faults: Sequence[float]) -> list[tuple[float, float]]:
    """For each fault the seconds to the next step, and all that passed in outages until the next fault."""
    gaps = [(a, b) for a, b in zip(seen, seen[1:], strict=False) if b - a > PAUSE]
    found = []
    for fault, following in zip(faults, [*faults, float("inf")][1:], strict=True):
        after = [b - a for a, b in gaps if fault < b <= following]
        found.append((after[0], sum(after)) if after else (0.0, 0.0))
    return found


def ranks_of(job: int, word: str) -> list[psutil.Process]:
    """The processes below a launcher that run Python with an argument."""
    found = []
    for process in psutil.Process(job).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if word in process.cmdline() and process.name().startswith("python"):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def run(side: Side, work: Work, faults: int, chance: random.Random) -> Course:
    """Train to the end, with `faults` faults on the way."""
    work.folder.mkdir(parents=True)
    course, steps = Course(), Steps(work.run_dir)
    job = jobs.start([str(word) for word in side.words(work)], work.folder / "log")
    began = time.monotonic()

    def wait_until(true: Callable[[], bool]) -> bool:
        """False: the job has ended. Raises TimeoutError."""
        while job.poll() is None:
            steps.look()
            if true():
                return True
            if time.monotonic() > max([began, *steps.seen[-1:], *course.faults[-1:]]) + SILENCE:
                raise TimeoutError
            time.sleep(LOOK)
        steps.look()
        return False

    checked = 0

    def is_whole() -> bool:
        nonlocal checked
        if len(steps.seen) == checked:
            return False  # a look at all processes takes time from a job that starts again
        checked = len(steps.seen)
        return len(ranks_of(job.pid, side.word)) == work.ranks

    def has_made(count: int) -> bool:
        return len(steps.seen) >= count

    def has_passed(end: float) -> bool:
        return time.monotonic() > end

    try:
        while len(course.faults) < faults:
            wait, number = chance.random() * 2, chance.randrange(work.ranks)
            # While a lost rank is being started no step is made, so the next steps are of all ranks.
            if not (
                wait_until(is_whole)
                and wait_until(partial(has_made, len(steps.seen) + 3))
                and wait_until(partial(has_passed, time.monotonic() + wait))
            ):
                break
            running = ranks_of(job.pid, side.word)
            if len(running) == work.ranks:
                course.faults.append(time.monotonic())
                running[number].kill()
                click.echo(f"{side.name}: fault {len(course.faults)} at step {steps.made[-1]}", err=True)
                wait_until(partial(has_ended, running[number]))
        wait_until(lambda: False)
    except TimeoutError:
        course.told = f"made no step for {SILENCE:.0f} s"
    finally:
        jobs.kill(job)
    course.seen, course.twice, course.lost = steps.seen, steps.twice, work.steps - len({*steps.made})
    course.told = course.told or (f"ended with code {job.returncode}" if job.returncode else "")
    if course.told:
        course.told += f": {last_words(work.folder / 'log')}"
        return course
    course.digest = json.loads((work.run_dir / "summary.json").read_text())["weights_sha256"]
    return course


def last_words(log: Path) -> str:
    """The last line of a log in which a launcher reports an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"ERROR|E\d{4} |hvd_cifar: |elastic: ", line)]
    return ([""] + (telling or lines))[-1]


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. A zombie has."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


HEAD = (
    "side",
    "runs to the end",
    "faults",
    "s to the next step",
    "s without a step in all",
    "steps made twice a fault",
    "steps lost",
    "weights as if left alone",
    "s of a run, left alone",
)


def row(name: str, alone: Course, courses: Sequence[Course]) -> list[str]:
    """A side's row of the table: the results of the runs that came to their end, and how many did."""
    whole = [course for course in courses if not course.told]
    if not whole:
        return [name, f"0 of {len(courses)}", *[""] * (len(HEAD) - 2)]
    lost = [outage for course in whole for outage in outages(course.seen, course.faults)]
    first, total = ([outage[i] for outage in lost] for i in range(2))
    faults = sum(len(course.faults) for course in whole)
    same = sum(course.digest == alone.digest for course in whole)
    return [
        name,
        f"{len(whole)} of {len(courses)}",
        str(faults),
        *(f"{statistics.median(of):.1f}, at most {max(of):.1f}" if of else "" for of in (first, total)),
        f"{sum(course.twice for course in whole) / max(1, faults):.1f}",
        str(sum(course.lost for course in whole)),
        f"{same} of {len(whole)}",
        f"{statistics.median(course.seconds for course in whole):.0f}, {alone.seconds:.0f}",
    ]


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="Folder with binary CIFAR-10.")
@click.option("--ranks", type=click.IntRange(2, 4), default=2)
@click.option("--batch", type=click.IntRange(1), default=128, help="Global batch size, a multiple of --ranks.")
@click.option("--epochs", type=click.IntRange(1), default=1)
@click.option("--faults", type=click.IntRange(0), default=5, help="Faults in a run.")
@click.option("--rounds", type=click.IntRange(1), default=2, help="Runs of each side with faults.")
@click.option("--every", type=click.IntRange(1), default=10, help="Steps between torchrun's snapshots.")
@click.option("--only", multiple=True, type=click.Choice(list(SIDES)), help="Only these sides.")
@click.option("--environment", "peers", type=Path, default=Path("~/.cache/hvd_cifar/peers"), help="For PyTorch.")
@click.option("--seed", type=int, help="Of faults, moments and order of sides.")
@click.option("--keep", type=Path, help="Folder for the runs; without it they are removed.")
@setting.one_line_for_users()
def main(
    data_dir: Path,
    ranks: int,
    batch: int,
    epochs: int,
    faults: int,
    rounds: int,
    every: int,
    only: tuple[str, ...],
    peers: Path,
    seed: int | None,
    keep: Path | None,
) -> None:
    """Run the sides in turns, and print a table in Markdown."""
    jobs.end_on_signals()
    if ranks == 3:
        raise UserError("--ranks 3: hvd_cifar keeps the bits on a power of two of ranks; give 2 or 4")
    if batch % ranks:
        raise UserError(f"--batch {batch}: not a multiple of --ranks {ranks}")
    if keep and keep.exists():
        raise UserError(f"--keep {keep}: it exists; give another folder")
    data_dir = setting.real_data(data_dir)
    chosen = [name for name in SIDES if not only or name in only]
    python = Path(sys.executable)
    if TORCHRUN in chosen:
        python = environment.ensure(peers.expanduser().absolute())
    seed = random.randrange(1000) if seed is None else seed
    steps = epochs * sampler.steps_per_epoch(sides.EXAMPLES, batch)
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = keep.absolute() if keep else Path(thrown_away)

        def run_of(name: str, kind: str, count: int) -> Course:
            work = Work(ranks, batch, steps, every, data_dir, python, folder / name / kind)
            # Text, since the moments of a round are to be the same for all sides.
            course = run(SIDES[name], work, count, random.Random(f"{seed} {kind}"))
            click.echo(f"{name}, {kind}: {course.told or f'{course.seconds:.0f} s'}", err=True)
            return course

        alone = {name: run_of(name, "alone", 0) for name in chosen}
        courses: dict[str, list[Course]] = {name: [] for name in chosen}
        order = random.Random(seed)
        for number in range(rounds):
            for name in order.sample(chosen, len(chosen)):
                courses[name].append(run_of(name, f"round-{number + 1}", faults))
    _print(alone, courses)
    command = shlex.join(["python", "-m", "benchmarks.peers.elastic", *sys.argv[1:]])
    about = setting.about(**(environment.versions(python) if python != Path(sys.executable) else {}))
    print(f"\n{MODEL}, float32, {ranks} ranks, {steps} steps of {batch}, seed {seed}; {about}; command: {command}")


def _print(alone: dict[str, Course], courses: dict[str, list[Course]]) -> None:
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name, of_side in courses.items():
        print(f"| {' | '.join(row(SIDES[name].name, alone[name], of_side))} |")
    for name, of_side in courses.items():
        for course in (alone[name], *of_side):
            if course.told:
                print(f"\n{SIDES[name].name}, after fault {len(course.faults)}: {course.told}")


if __name__ == "__main__":
    main()
