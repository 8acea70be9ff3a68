"""A PREDICTION of eight GPUs, from one: what the all-reduce of NCCL's ring adds to a step. Nothing here was measured.

    python -m benchmarks.gpu.eight --measured FOLDER        # FOLDER of python -m benchmarks.gpu

A ring over n ranks sends 2 (n - 1) / n of the message through each link, in 2 (n - 1) hops. Nothing hides it: a step
takes its time on one GPU and the all-reduce. Bandwidths are those of the links; NCCL's share of them and the latencies
are assumptions.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import click

if __name__ == "__main__":  # before the import of TensorFlow, which only builds the nets
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
from benchmarks import nets, setting
from benchmarks.gpu.steps import PRODUCT, Found
from hvd_cifar.errors import UserError

RANKS = 8
EXTRA = 2 * 4  # bytes of loss and penalty in the message
# Gigabytes a second of a ring's link in one direction, and microseconds of a hop. NVLink of an H100: 450 GB/s.
LINKS = {
    "NVLink": (450.0, 5.0),
    "400 Gbit/s": (50.0, 15.0),
    "100 Gbit/s": (12.5, 20.0),
    "25 Gbit/s": (3.125, 25.0),
}
SHARE = 0.8  # of a link's bandwidth that NCCL reaches with large messages


def ring_seconds(size: float, ranks: int, gigabytes: float, microseconds: float) -> float:
    """The time of a ring all-reduce of `size` bytes; 0 for one rank."""
    hops = 2 * (ranks - 1)
    return hops / ranks * size / (gigabytes * 1e9 * SHARE) + hops * microseconds * 1e-6 if ranks > 1 else 0.0


def measured(folder: Path) -> dict[str, float]:
    """Seconds of the product's float32 step of 128 images by net, of the files of `python -m benchmarks.gpu`."""
    found = {}
    for path in sorted(folder.glob("steps-*-float32-128.json")):
        if seconds := Found(**json.loads(path.read_text())).seconds(PRODUCT):
            found[path.name.split("-")[1]] = statistics.median(seconds)
    return found


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--measured", "folder", type=Path, help="Folder of `python -m benchmarks.gpu`.")
@setting.one_line_for_users()
def main(folder: Path | None) -> None:
    """Print the table, in Markdown."""
    seconds = measured(folder) if folder else {}
    if folder and not seconds:
        raise UserError(f"--measured {folder}: no step of 128 images in float32 there; see python -m benchmarks.gpu")
    print(f"PREDICTED, not measured: {RANKS} ranks, float32, 128 images a rank, one ring, nothing hidden\n")
    head = [f"{name}: all-reduce, efficiency" for name in LINKS]
    print(f"| net | bytes | step on one GPU | {' | '.join(head)} |\n|" + "---|" * (len(LINKS) + 3))
    for name in ("resnet20", "resnet32", "resnet56", "tutorial", "fast"):
        size = 4 * nets.build(name, 24 if name == "tutorial" else 32).parameters + EXTRA
        cells = []
        for gigabytes, microseconds in LINKS.values():
            taken = ring_seconds(size, RANKS, gigabytes, microseconds)
            share = f"{seconds[name] / (seconds[name] + taken):.2f}" if name in seconds else "-"
            cells.append(f"{1e3 * taken:.2f} ms, {share}")
        step = f"{1e3 * seconds[name]:.1f} ms" if name in seconds else "not measured"
        print(f"| {name} | {size:,} | {step} | {' | '.join(cells)} |")
    links = "; ".join(f"{name}: {gigabytes:g} GB/s, {hop:g} us a hop" for name, (gigabytes, hop) in LINKS.items())
    print(f"\nAssumed: {links}; NCCL reaches {SHARE:.0%} of the bandwidth.")


if __name__ == "__main__":
    main()
