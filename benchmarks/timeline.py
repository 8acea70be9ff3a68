"""A picture of a training step over a limited link: how much of the all-reduces the computation hides.

    python -m benchmarks.timeline --data-dir D --output timeline.png      # as root: it makes two hosts of namespaces

It makes two runs: all gradients in one message, and in buckets. The profile of the last step (docs/profile.md) tells
when rank 0 gave each message, when all ranks had, and when the sum was back. The computation lasts from the step's
start to the last message.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks import setting
from benchmarks.peers import network
from hvd_cifar.tools.benchmark.results import check_writable
from tests.cluster.hosts import Cluster

HOSTS, STEPS = 2, 12
WAYS = {"one message": "off", "buckets": "on"}


class Message(NamedTuple):
    """When all ranks had given a message, and when its sum was back; milliseconds from the step's start."""

    begin: float
    end: float


def messages(path: Path) -> tuple[list[Message], float]:
    """Rank 0's messages in the profile of one step, by their end, and the milliseconds of its computation."""
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["pid"] == 0]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(lanes[event["tid"]], []).append(event)
    (computation,) = rows["gradients"]
    found = []
    for name, row in rows.items():
        if name.startswith("message "):
            whole, *waits = row
            ended = sum(e["dur"] for e in waits)
            begin = whole["ts"] - computation["ts"]
            found.append(Message((begin + ended) / 1000, (begin + whole["dur"]) / 1000))
    return sorted(found, key=lambda message: message.end), computation["dur"] / 1000


def draw(steps: dict[str, tuple[list[Message], float]], title: str, path: Path) -> None:
    """One row of bars for the computation and one for the messages, for each way."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(steps), 1, figsize=(10, 4), sharex=True, layout="constrained")
    for axis, (way, (found, computed)) in zip(axes, steps.items(), strict=True):
        axis.broken_barh([(0, computed)], (0.6, 0.4), color="tab:blue")
        for message in found:
            hidden = max(0.0, min(message.end, computed) - message.begin)
            shown = message.end - message.begin - hidden
            axis.broken_barh([(message.begin, hidden)], (0, 0.4), color="tab:green", edgecolor="white")
            axis.broken_barh([(message.end - shown, shown)], (0, 0.4), color="tab:red", edgecolor="white")
        axis.set(yticks=[0.2, 0.8], yticklabels=["all-reduce", "computation"], title=way)
    axes[-1].set_xlabel("milliseconds of a step; green: hidden, red: not hidden")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def run_once(hosts: Cluster, options: Sequence[str], run_dir: Path) -> tuple[list[Message], float]:
    """The messages and the computation of a short run's last step; one rank on each host."""
    slots = ",".join(f"{host.name}:1" for host in hosts)
    words = ["hvd_cifar.launch", "-H", slots, "train", *options, "--run-dir", str(run_dir)]
    network.run_job(hosts[0], [*words, "--profile-steps", f"{STEPS}:{STEPS}"], run_dir.with_suffix(".log"))
    return messages(run_dir / f"profile/steps-{STEPS}-{STEPS}.json.gz")


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="With CIFAR-10, binary layout.")
@click.option("--model", default="resnet20")
@click.option("--precision", default="mixed_bfloat16")
@click.option("--link", default="100mbit")
@click.option("--batch-size", type=click.IntRange(1), default=128, help="Of a rank.")
@click.option("--bucket-bytes", default="64K")
@click.option("--output", type=Path, default=Path("timeline.png"))
@setting.one_line_for_users()
def main(
    data_dir: Path, model: str, precision: str, link: str, batch_size: int, bucket_bytes: str, output: Path
) -> None:
    """Run both ways, and draw the last step of each."""
    network.check(HOSTS, HOSTS, [link])
    check_writable(output)
    common = ["--dataset", "cifar10", "--data-dir", setting.real_data(data_dir), "--model", model]
    common += ["--precision", precision, "--batch-size", batch_size, "--max-steps", STEPS]
    common += ["--eval-every", 0, "--log-every", STEPS + 1, "--check-sync-every", 0]
    steps = {}
    with tempfile.TemporaryDirectory() as name, network.pinned_hosts(HOSTS, Path(name) / "hosts") as hosts:
        network.limit(hosts, link)
        for way, overlap in WAYS.items():
            options = [*common, "--overlap", overlap]
            options += ["--bucket-bytes", bucket_bytes] if overlap == "on" else []
            steps[way] = run_once(hosts, [str(word) for word in options], Path(name) / overlap)
            shown, _ = steps[way]
            click.echo(f"{way}: {len(shown)} messages, {shown[-1].end:.0f} ms to the last sum")
    draw(steps, f"{model}, {precision}, 2 hosts x 1 rank, {link}", output)


if __name__ == "__main__":
    main()
