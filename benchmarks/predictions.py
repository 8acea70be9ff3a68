"""Steps over a limited link, predicted first and measured afterwards.

    python -m benchmarks.predictions --data-dir D --model resnet20 --link 100mbit                  # as root
    python -m benchmarks.predictions --emulate-compute 50ms --hosts 2,4,8 --per-host 2 --link 100mbit

`benchmark predict` predicts from a step on the fewest hosts without a limit, and from all-reduces on the two smallest
numbers of hosts over the limited link. The prediction is printed before the steps over the link are measured. With
--emulate-compute a rank sleeps instead of computing, so that ranks may outnumber cores. The table then also has the
bytes that a host's network card sends in a step, beside the least possible, 2 (H - 1) / H of the gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import setting
from benchmarks.peers import network
from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.fits import traffic
from hvd_cifar.tools.benchmark.results import EmulatedResult, Prediction, PredictResult, StepResult, read
from tests.cluster.hosts import Cluster


@dataclass(frozen=True)
class Job:
    """How ranks start: the hosts, ranks on each, and over what."""

    hosts: Cluster
    per_host: int
    folder: Path

    def run(self, count: int, *words: Any) -> Path:
        """Run `benchmark WORDS` on the first `count` hosts; its JSON file."""
        output = self.folder / f"{len(list(self.folder.iterdir()))}.json"
        slots = ",".join(f"{host.name}:{self.per_host}" for host in list(self.hosts)[:count])
        command = ["hvd_cifar.launch", "-H", slots]
        command += ["benchmark", *map(str, words), "--json", str(output)]
        network.run_job(self.hosts[0], command, output.with_suffix(".log"))
        return output


@dataclass(frozen=True)
class Row:
    """A step on some hosts.

    Attributes:
        hosts, ranks: their numbers.
        predicted, measured: seconds of a step.
        way: how gradients left.
        sent, least: bytes that a host sends in a step, and the least possible; None where they were not counted.
    """

    hosts: int
    ranks: int
    predicted: float
    measured: float
    way: str
    sent: float | None = None
    least: float | None = None

    @classmethod
    def of(cls, hosts: int, predicted: Prediction, way: str, found: StepResult | EmulatedResult) -> Row:
        """From a prediction, and the result of `benchmark step` on as many ranks."""
        n = predicted.ranks
        seconds = next(world.step_seconds.mean for world in found.worlds if world.ranks == n)
        row = cls(hosts, n, predicted.step_seconds, seconds, way)
        if not isinstance(found, EmulatedResult):
            return row
        sent = next(world.sent_bytes for world in found.worlds if world.ranks == n)
        return replace(row, sent=sent, least=traffic(hosts) * sum(found.gradients))

    def __str__(self) -> str:
        times = f"{self.predicted * 1e3:.1f} | {self.measured * 1e3:.1f} | {self.predicted / self.measured - 1:+.1%}"
        sent = f"{self.sent / 1e6:.2f}, {self.sent / self.least - 1:+.1%}" if self.sent and self.least else ""
        return f"| {self.hosts} | {self.ranks} | {times} | {self.way} | {sent} |"


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    names = ["hosts", "ranks", "predicted, ms", "measured, ms", "error", "gradients leave", "a host sends, MB"]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *map(str, rows)])


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="Folder with binary CIFAR-10.")
@click.option("--model", default="resnet20")
@click.option("--precision", default="mixed_bfloat16")
@click.option("--compression", default="none")
@click.option("--batch-size", type=click.IntRange(1), default=128, help="Examples of a rank.")
@click.option("--emulate-compute", help="Sleep of each step, such as 50ms, instead of its computation.")
@click.option("--link", default="100mbit")
@click.option("--hosts", default="2", help="Numbers of hosts to predict for and to measure, such as 2,4,8.")
@click.option("--per-host", type=click.IntRange(1), default=1, help="Ranks on each host.")
@click.option("--repeats", type=click.IntRange(1), default=5)
@click.option("--steps", type=click.IntRange(1), default=10)
@setting.one_line_for_users()
def main(
    data_dir: Path,
    model: str,
    precision: str,
    compression: str,
    batch_size: int,
    emulate_compute: str | None,
    link: str,
    hosts: str,
    per_host: int,
    repeats: int,
    steps: int,
) -> None:
    """Predict, measure, print a table in Markdown."""
    counts = _counts(hosts)
    network.check(counts[-1], counts[-1] * per_host, [link], share_cores=emulate_compute is not None)
    step = ["step", "--model", model, "--repeats", repeats, "--steps", steps]
    if emulate_compute:
        step += ["--dataset", "synthetic", "--threads-per-rank", 1, "--emulate-compute", emulate_compute]
    else:
        step += ["--dataset", "cifar10", "--data-dir", setting.real_data(data_dir), "--precision", precision]
        step += ["--batch-size", batch_size, "--compression", compression]
    with tempfile.TemporaryDirectory() as name, network.pinned_hosts(counts[-1], Path(name) / "hosts") as made:
        (folder := Path(name) / "results").mkdir()
        job = Job(made, per_host, folder)
        of_step = job.run(counts[0], *step, "--ranks", counts[0] * per_host)
        network.limit(made, link)
        few = counts[:2]
        sizes = ["--min-bytes", "16K", "--max-bytes", "4M", "--factor", 4, "--repeats", 3]
        ranks = ",".join(str(n * per_host) for n in few)
        of_allreduce = job.run(few[-1], "allreduce", *sizes, "--ranks", ranks)
        given = ["--step", of_step, "--allreduce", of_allreduce, "--ranks", ",".join(str(n * per_host) for n in counts)]
        path = job.run(1, "predict", *given, "--ranks-per-host", per_host)
        click.echo(path.with_suffix(".log").read_text(), err=True)
        predicted = {p.ranks: p for p in read(PredictResult, path, "--json").predictions}
        rows = []
        for count in counts:
            n = count * per_host
            found = predicted[n]
            way = ["--overlap", "off"]
            if found.bucket_bytes is not None:
                way = ["--overlap", "on", "--bucket-bytes", found.bucket_bytes]
            result = read(StepResult | EmulatedResult, job.run(count, *step, *way, "--ranks", n), "--step")
            shown = "in one message" if way[1] == "off" else f"in buckets of {found.bucket_bytes} bytes"
            rows.append(Row.of(count, found, shown, result))
            click.echo(rows[-1], err=True)
    print(f"{table(rows)}\n\n{model}, {link}; {setting.about()}")


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 2:
        raise UserError(f"--hosts {text}: not numbers from 2 on; write them as 2,4,8")
    return counts


if __name__ == "__main__":
    main()
