"""Images/s of the input of pictures, beside Keras's and PyTorch's, on the same files and cores.

    python -m benchmarks.images FOLDER --size 224 --ranks 2

FOLDER holds a folder of pictures for each class. Each library gets batches of float images of the size, cut at random
from the pictures (`image_dataset_from_directory` has no random crops: it resizes), shuffled, without a training step.
A turn of each follows one of the others; the first turn is a warm-up and does not count. With two ranks as many
processes run at the same time, each on its share of the pictures, and their images/s are added. Images for each second
of a core's time do not depend on what else the machine does. PyTorch is measured where `--torch` names a Python that
has torchvision.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

BATCH = 32
Input = Callable[[argparse.Namespace], Iterator[Any]]


def ours(given: argparse.Namespace) -> Iterator[Any]:
    """The batches of `train` from the cache, which is made before."""
    from hvd_cifar.data.augment import transforms
    from hvd_cifar.data.folder import Folder
    from hvd_cifar.data.pipeline import training_batches
    from hvd_cifar.data.sampler import Sampler

    source = Folder(given.folder, (given.size, given.size))
    begin = time.monotonic()
    dataset = source.read(source.prepare(given.folder.parent / "data"))
    if time.monotonic() - begin > 3:
        print(f"cache made in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    sampler = Sampler(len(dataset.train), BATCH * given.ranks, 0, given.rank, given.ranks)
    batches = training_batches(dataset.train, transforms("standard", dataset), sampler, first_step=0, last_step=1 << 40)
    return iter(batches)


def of_keras(given: argparse.Namespace) -> Iterator[Any]:
    """`image_dataset_from_directory`, which decodes and resizes with as many threads as tf.data likes."""
    import tensorflow as tf

    half = {"validation_split": 0.5, "subset": ("training", "validation")[given.rank]} if given.ranks == 2 else {}
    with redirect_stdout(sys.stderr):  # it prints which half it takes
        found = tf.keras.utils.image_dataset_from_directory(
            given.folder, image_size=(given.size, given.size), batch_size=BATCH, crop_to_aspect_ratio=True, seed=0,
            verbose=False, **half,
        )  # fmt: skip
    scaled = found.map(lambda image, label: (image / 127.5 - 1, label), tf.data.AUTOTUNE)
    return iter(scaled.repeat().prefetch(tf.data.AUTOTUNE))


def of_torch(given: argparse.Namespace) -> Iterator[Any]:
    """`ImageFolder` and `DataLoader` with a worker for each core of the rank, and the transforms of its examples."""
    import torch
    from torchvision import datasets, transforms  # type: ignore[import-not-found]

    steps = [
        transforms.RandomResizedCrop(given.size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    dataset = datasets.ImageFolder(given.folder, transforms.Compose(steps), allow_empty=True)
    own = torch.utils.data.Subset(dataset, range(given.rank, len(dataset), given.ranks))
    workers = max(1, len(os.sched_getaffinity(0)) // given.ranks)
    loader = torch.utils.data.DataLoader(own, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
    while True:
        yield from loader


LIBRARIES: dict[str, Input] = {"hvd_cifar": ours, "Keras": of_keras, "PyTorch": of_torch}


def core_seconds() -> float:
    """The time that cores have worked for this process and its children."""
    pids = ["self", *Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(ticks) for pair in fields for ticks in pair) / os.sysconf("SC_CLK_TCK")


def serve(given: argparse.Namespace) -> None:
    """One rank of one library: for each line on stdin it takes batches for some seconds, and prints what it took."""
    batches = LIBRARIES[given.serve](given)
    next(batches)
    print("ready", flush=True)
    for line in sys.stdin:
        begin, worked, images = time.monotonic(), core_seconds(), 0
        while (taken := time.monotonic() - begin) < float(line):
            images += len(next(batches)[1])
        print(images, taken, core_seconds() - worked, flush=True)


def measure(given: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Images/s of all ranks together, and images for each second of a core, in each turn, by library."""
    names = [name for name in LIBRARIES if name != "PyTorch" or given.torch]
    words = [__file__, str(given.folder), "--size", str(given.size), "--ranks", str(given.ranks)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    started = {}
    for name in names:  # one after the other: the first makes the cache
        command = [given.torch if name == "PyTorch" else sys.executable, *words, "--serve", name]
        ranks = range(given.ranks)
        started[name] = [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in ranks]
        for process in started[name]:
            assert process.stdout and process.stdout.readline() == "ready\n", name
    for turn in range(given.turns + 1):
        for name, processes in started.items():
            for process in processes:
                print(given.seconds, file=process.stdin, flush=True)
            said = [tuple(map(float, process.stdout.readline().split())) for process in processes if process.stdout]
            images, _, worked = (sum(part) for part in zip(*said, strict=True))
            found[name] += [(sum(part[0] / part[1] for part in said), images / worked)] * (turn > 0)
            time.sleep(1)  # what it has begun ahead ends
    for process in (process for processes in started.values() for process in processes):
        process.kill()
        process.wait()
    return found


def main() -> None:
    """Print a table: images/s (median, range), images for each second of a core, and the ratio of ours to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    for name, default in (("size", 224), ("rank", 0), ("turns", 5), ("seconds", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--torch", help="a Python that has torchvision")
    parser.add_argument("--serve", choices=LIBRARIES)
    given = parser.parse_args()
    if given.serve:
        serve(given)
        return
    found = measure(given)
    best = statistics.median(of_core for _, of_core in found["hvd_cifar"])
    for name, turns in found.items():
        rates, of_cores = zip(*turns, strict=True)
        low, middle, high = (f"{value:,.0f}" for value in (min(rates), statistics.median(rates), max(rates)))
        of_core = statistics.median(of_cores)
        cells = [
            given.size,
            given.ranks,
            name,
            f"{middle} ({low} to {high})",
            f"{of_core:,.0f}",
            f"{best / of_core:.2f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
