"""One training step over a limited link, drawn: what of the all-reduces is hidden behind the computation.

    python -m benchmarks.timeline --data-dir D --output timeline.png      # as root: it makes two hosts of namespaces

It makes two runs: all gradients in one message, and in buckets. Horovod's timeline tells when each message was ready
and reduced. The computation lasts from the last sum of one step to the last message of the next.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks import setting
from benchmarks.peers import network
from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.results import check_writable
from tests.cluster.hosts import Cluster

HOSTS, STEPS = 2, 12
WAYS = {"one message": "off", "buckets": "on"}


class Message(NamedTuple):
    """When a message was ready, when its all-reduce began, and when it ended; milliseconds."""

    tensor: int
    ready: float
    begin: float
    end: float


def messages(events: Sequence[dict[str, Any]]) -> list[Message]:
    """The all-reduces of a timeline of Horovod's, by their end."""
    waiting: dict[int, list[tuple[str, float]]] = {}
    times: dict[int, dict[str, float]] = {}
    found = []
    for event in events:
        tensor, now = event.get("pid", -1), event.get("ts", 0) / 1000
        if event.get("ph") == "B":
            waiting.setdefault(tensor, []).append((event["name"], now))
        elif event.get("ph") == "E" and waiting.get(tensor):
            name, began = waiting[tensor].pop()
            times.setdefault(tensor, {})[name] = began
            if name == "ALLREDUCE":
                seen = times.pop(tensor)
                found.append(Message(tensor, seen.get("NEGOTIATE_ALLREDUCE", began), began, now))
    return sorted(found, key=lambda message: message.end)


def last_step(found: Sequence[Message], steps: int) -> tuple[list[Message], float]:
    """The messages of the last step, and its start: the last sum of the step before.

    Args:
        steps: of the run. Tensors that were sent at least `steps` times belong to the training step.
    """
    by_tensor: dict[int, list[Message]] = {}
    for message in found:
        by_tensor.setdefault(message.tensor, []).append(message)
    of_step = [sent for sent in by_tensor.values() if len(sent) >= steps]
    if not of_step or steps < 2:
        raise UserError(f"the timeline holds no message that was sent in each of {steps} steps")
    return sorted((sent[-1] for sent in of_step), key=lambda m: m.end), max(sent[-2].end for sent in of_step)


def draw(steps: dict[str, tuple[list[Message], float]], title: str, path: Path) -> None:
    """One row of bars for the computation and one for the messages, for each way."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(steps), 1, figsize=(10, 4), sharex=True, layout="constrained")
    for axis, (way, (found, start)) in zip(axes, steps.items(), strict=True):
        computed = max(message.ready for message in found) - start
        axis.broken_barh([(0, computed)], (0.6, 0.4), color="tab:blue")
        for message in found:
            hidden = max(0.0, min(message.end - start, computed) - (message.begin - start))
            shown = message.end - message.begin - hidden
            axis.broken_barh([(message.begin - start, hidden)], (0, 0.4), color="tab:green", edgecolor="white")
            axis.broken_barh([(message.end - start - shown, shown)], (0, 0.4), color="tab:red", edgecolor="white")
        axis.set(yticks=[0.2, 0.8], yticklabels=["all-reduce", "computation"], title=way)
    axes[-1].set_xlabel("milliseconds of a step; green: hidden, red: not hidden")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def run_once(hosts: Cluster, options: Sequence[str], timeline: Path) -> list[Message]:
    """The messages of a short run on all hosts, one rank each."""
    slots = ",".join(f"{host.name}:1" for host in hosts)
    words = ["hvd_cifar.launch", "--mpi", "-H", slots, "train", *options]
    network.run_job(hosts[0], words, timeline.with_suffix(".log"), HOROVOD_TIMELINE=str(timeline))
    text = timeline.read_text().rstrip().rstrip(",")
    return messages(json.loads(text if text.endswith("]") else text + "]"))


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
    common += ["--eval-every", 0, "--eval-examples", 10, "--log-every", STEPS + 1, "--check-sync-every", 0]
    steps = {}
    with tempfile.TemporaryDirectory() as name, network.pinned_hosts(HOSTS, Path(name) / "hosts") as hosts:
        network.limit(hosts, link)
        for way, overlap in WAYS.items():
            place = Path(name) / overlap
            options = [*common, "--overlap", overlap, "--run-dir", place / "run"]
            options += ["--bucket-bytes", bucket_bytes] if overlap == "on" else []
            place.mkdir()
            found = run_once(hosts, [str(word) for word in options], place / "timeline.json")
            steps[way] = last_step(found, STEPS)
            shown, start = steps[way]
            click.echo(f"{way}: {len(shown)} messages, {shown[-1].end - start:.0f} ms from sum to sum")
    draw(steps, f"{model}, {precision}, 2 hosts x 1 rank, {link}", output)


if __name__ == "__main__":
    main()
