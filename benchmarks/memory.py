"""Memory of every rank over an epoch, to show that a host holds the images once.

    python -m benchmarks.memory --data-dir D                         # resnet20, 2 ranks, one epoch
    python -m benchmarks.memory --data-dir D --ranks 4 -- --model tutorial

It reads Linux's `smaps_rollup` and `smaps` of the ranks' processes after every --every steps. RSS is resident memory;
in PSS a page that k processes share counts 1/k. Options of `train` follow after `--`.
"""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click
import psutil

from benchmarks import jobs, runs, setting

MIB = 1024  # kB, as the kernel counts
IMAGES = re.compile(r"(data_batch_\d|test_batch)\.bin$")


class Memory(NamedTuple):
    """A process's RSS and PSS in MiB, of all its memory and of the files of images."""

    resident: float
    own: float
    images: float
    images_own: float


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True)
@click.option("--ranks", type=click.IntRange(1), default=2)
@click.option("--every", type=click.IntRange(1), default=39, help="Steps between two readings.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@setting.one_line_for_users()
def main(data_dir: Path, ranks: int, every: int, options: tuple[str, ...]) -> None:
    """Train one epoch, then print a table in Markdown."""
    jobs.end_on_signals()
    data_dir = setting.real_data(data_dir)
    print("| step | " + " | ".join(f"rank {i}: RSS, PSS; of images: RSS, PSS" for i in range(ranks)) + " |")
    print("|---" * (ranks + 1) + "|")
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        common = ["--model", "resnet20", "--dataset", "cifar10", "--data-dir", data_dir]
        common += ["--epochs", 1, "--eval-every", 0, "--log-every", every, *options, "--run-dir", run_dir]
        job = jobs.start(jobs.command(ranks, *common), run_dir / "log")
        try:
            seen: set[int] = set()
            while job.poll() is None:
                for step in sorted(set(runs.losses(run_dir)) - seen):
                    seen.add(step)
                    with suppress(psutil.Error, OSError):  # ranks that have just ended
                        found = " | ".join(_words(of_rank) for of_rank in _look(job.pid))
                        print(f"| {step} | {found} |", flush=True)
                time.sleep(0.05)
        finally:
            jobs.kill(job)
        if job.returncode or not seen:
            raise SystemExit((run_dir / "log").read_text())
    print(f"\n{setting.about()}")


def _look(launcher: int) -> list[Memory]:
    """The memory of the ranks that a launcher has started, in the order of their process ids."""
    root = psutil.Process(launcher)
    tree = [root, *root.children(recursive=True)]
    return [_memory(p.pid) for p in sorted(tree, key=lambda p: p.pid) if "hvd_cifar" in p.cmdline() and _trains(p)]


def _trains(process: psutil.Process) -> bool:
    return "python" in Path(process.exe()).name


def _memory(pid: int) -> Memory:
    whole = _sums(Path(f"/proc/{pid}/smaps_rollup").read_text())
    images = [0.0, 0.0]
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
        if IMAGES.search(part.split("\n", 1)[0]):
            images = [one + other for one, other in zip(images, _sums(part), strict=True)]
    return Memory(*whole, *images)


def _sums(text: str) -> list[float]:
    """RSS and PSS, MiB."""
    return [sum(int(kb) for kb in re.findall(rf"^{name}: +(\d+) kB", text, re.M)) / MIB for name in ("Rss", "Pss")]


def _words(memory: Memory) -> str:
    return ", ".join(f"{value:,.0f}" for value in memory)


if __name__ == "__main__":
    main()
