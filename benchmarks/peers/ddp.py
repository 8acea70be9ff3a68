"""A net under PyTorch's DistributedDataParallel over Gloo, one process a rank: the peer of `horovodrun ... train`.

    RANK=0 WORLD_SIZE=2 PEERS/bin/python -m benchmarks.peers.ddp --store FILE --data-dir D --run-dir R

Runs in the peers' environment; `python -m benchmarks.peers` makes that, and starts the ranks. Net, loss, optimizer,
batch, order, augmentation and data are those of this project. What makes PyTorch fast on a CPU is on: channels last,
autocast to bfloat16, the fused optimizer, gradients that are views of the buckets, a static graph, no broadcast of the
moving statistics, local response normalisation by a product of matrices, an allocator that keeps its memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import torch_resnet, torch_tutorial
from benchmarks.peers.torch_views import PAD, Distorted, Windows, decaying, keep_memory, read_cifar
from hvd_cifar.data import sampler
from hvd_cifar.data.cifar import SIDE

PARAMETERS = {"tutorial": 1_068_298, "resnet20": 269_722, "resnet32": 464_154, "resnet56": 853_018}
PATIENCE = timedelta(days=1)  # ranks are stopped while others are measured


@dataclass(frozen=True)
class Work:
    """What depends on the model, as in this project's recipes."""

    net: Any
    decayed: list[Any]
    rate: float
    momentum: float
    weight_decay: float
    pad: int = 0  # pixels on each side of an image, in the mean's colour
    window: int = SIDE  # pixels, side of what is cut
    views: type[Windows] = Windows
    ema_decay: float = 0.0


def work_of(model: str, batch: int) -> Work:
    """See the class; `batch` is that of all ranks."""
    if model == "tutorial":
        net = torch_tutorial.Tutorial()
        options: dict[str, Any] = {"window": SIDE * 3 // 4, "views": Distorted, "ema_decay": 0.9999}
        rate, momentum = (0.1 * batch / 128, 0.0) if batch <= 128 else (0.02 * batch / 256, 0.9)
        return Work(net, torch_tutorial.decayed(net), rate, momentum, weight_decay=0.004, **options)
    resnet = torch_resnet.ResNet(int(model.removeprefix("resnet")))
    rate = 0.1 * batch / 128
    return Work(resnet, torch_resnet.kernels(resnet), rate=rate, momentum=0.9, weight_decay=1e-4, pad=PAD)


class MovingAverage:
    """Exponential moving averages of the weights, as the tutorial keeps them for evaluation."""

    def __init__(self, net: Any, decay: float) -> None:
        self.sources = [p.data for p in net.parameters()]
        self.values = [p.clone() for p in self.sources]
        self.decay, self.updates = decay, 0

    def update(self) -> None:
        """Update the averages with the current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, self.sources, 1 - decay)


def main() -> None:
    """Train for ever."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", required=True, help="File in which ranks find each other; it must not exist.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", choices=tuple(PARAMETERS), default="resnet20")
    parser.add_argument("--batch-size", type=int, default=128, help="Examples of a rank.")
    parser.add_argument("--precision", choices=("float32", "mixed_bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--run-dir", type=Path, required=True)
    given = parser.parse_args()
    keep_memory()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    store = f"file://{Path(given.store).absolute()}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=PATIENCE)

    dataset = read_cifar(parser, given.data_dir)
    autocast = given.precision == "mixed_bfloat16"
    batch = given.batch_size * size
    work = work_of(given.model, batch)
    dtype = torch.bfloat16 if autocast else torch.float32
    mean, deviation = dataset.channel_mean, dataset.channel_deviation
    images = work.views(dataset.train.images, work.pad, "mean", mean, deviation, dtype, work.window)
    labels = torch.from_numpy(dataset.train.labels.astype(np.int64))
    del dataset

    net = work.net.to(memory_format=torch.channels_last)
    count = sum(p.numel() for p in net.parameters())
    if count != PARAMETERS[given.model]:
        raise RuntimeError(f"the net has {count:,} parameters, not {PARAMETERS[given.model]:,}: it is another net")
    chosen = {"gradient_as_bucket_view": True, "static_graph": True, "forward_sync_buffers": False}
    replica = DistributedDataParallel(net, **chosen)
    groups = decaying(net, work.decayed, work.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=work.rate, momentum=work.momentum, fused=True)
    averages = MovingAverage(net, work.ema_decay) if work.ema_decay else None
    loss_of = nn.CrossEntropyLoss()
    generator = torch.Generator()
    given.run_dir.mkdir(parents=True, exist_ok=True)
    metrics = (given.run_dir / "metrics.jsonl" if rank == 0 else Path(os.devnull)).open("w", buffering=1)

    per_epoch = sampler.steps_per_epoch(len(labels), batch)
    indices: Any = None
    for step in itertools.count():
        epoch, within = divmod(step, per_epoch)
        if within == 0:
            indices = torch.from_numpy(sampler.epoch_order(0, epoch, len(labels)))
        index = indices[within * batch : (within + 1) * batch][rank::size]
        generator.manual_seed(step * size + rank)
        mirrored = torch.rand(len(index), generator=generator) < 0.5
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = replica(images.random(index, mirrored, generator))
        loss = loss_of(logits.float(), labels[index])
        optimizer.zero_grad(set_to_none=False)  # gradients that are views of the buckets stay so
        loss.backward()
        optimizer.step()
        if averages:
            averages.update()
        if (step + 1) % given.log_every == 0:
            metrics.write(json.dumps({"event": "train", "step": step + 1, "loss": loss.item()}) + "\n")


if __name__ == "__main__":
    main()
