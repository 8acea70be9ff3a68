"""A ResNet under PyTorch's DistributedDataParallel over Gloo, one process a rank: the peer of `horovodrun ... train`.

    RANK=0 WORLD_SIZE=2 PEERS/bin/python -m benchmarks.peers.ddp --store FILE --data-dir D --run-dir R

Runs in the peers' environment; `python -m benchmarks.peers` makes that, and starts the ranks. The same net, loss,
optimizer, batch, order, augmentation and data as this project's own; what makes PyTorch fast on a CPU is on: channels
last, autocast to bfloat16, the fused optimizer, gradients that are views of the buckets, a static graph, moving
statistics not sent, an allocator that keeps its memory. --defaults leaves DDP, SGD and the allocator as they are.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.allocator import keep_memory
from benchmarks.peers.stamps import Stamps
from benchmarks.peers.torch_resnet import ResNet, kernels
from benchmarks.peers.torch_views import Windows
from hvd_cifar.data import cifar10, order

MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)  # as data.augment; its module needs TensorFlow
PAD = 4
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
RATE = 0.1  # for a batch of 128
PARAMETERS = {20: 269_722, 32: 464_154, 56: 853_018}
PATIENCE = timedelta(days=1)  # ranks are stopped while others are measured


def main() -> None:
    """Train until --max-steps, or for ever."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", required=True, help="File in which ranks find each other; it must not exist.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="Of a rank.")
    parser.add_argument("--precision", choices=("float32", "mixed_bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--defaults", action="store_true", help="DDP, SGD and the allocator as they are by default.")
    given = parser.parse_args()
    if not given.defaults:
        keep_memory()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    store = f"file://{Path(given.store).absolute()}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=PATIENCE)

    folder = cifar10.locate(given.data_dir)
    if folder is None:
        parser.error(f"--data-dir {given.data_dir}: no CIFAR-10 in its binary layout is there")
    examples = cifar10.read(folder, "train")
    autocast = given.precision == "mixed_bfloat16"
    images = Windows(examples.images, PAD, "mean", MEAN, DEVIATION, torch.bfloat16 if autocast else torch.float32)
    labels = torch.from_numpy(examples.labels.astype(np.int64))
    del examples

    net = ResNet(given.depth).to(memory_format=torch.channels_last)
    count = sum(p.numel() for p in net.parameters())
    if count != PARAMETERS.get(given.depth, count):
        raise RuntimeError(f"the net has {count:,} parameters, not {PARAMETERS[given.depth]:,}: it is another net")
    chosen = {"gradient_as_bucket_view": True, "static_graph": True, "forward_sync_buffers": False}
    replica = DistributedDataParallel(net, **({} if given.defaults else chosen))
    decayed = kernels(net)
    held = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in net.parameters() if id(p) not in held], "weight_decay": 0.0},
    ]
    batch = given.batch_size * size
    fused = None if given.defaults else True
    optimizer = torch.optim.SGD(groups, lr=RATE * batch / 128, momentum=MOMENTUM, fused=fused)
    loss_of = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(rank)
    stamps = Stamps(given.run_dir if rank == 0 else None)

    per_epoch = order.steps_per_epoch(len(labels), batch)
    step = 0
    indices: Any = None
    while given.max_steps is None or step < given.max_steps:
        epoch, within = divmod(step, per_epoch)
        if within == 0:
            indices = torch.from_numpy(order.epoch_order(0, epoch, len(labels)))
        index = indices[within * batch : (within + 1) * batch][rank::size]
        mirrored = torch.rand(len(index), generator=generator) < 0.5
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = replica(images.random(index, mirrored, generator))
        loss = loss_of(logits.float(), labels[index])
        optimizer.zero_grad(set_to_none=given.defaults)  # gradients that are views of the buckets stay so
        loss.backward()
        optimizer.step()
        step += 1
        if step % given.log_every == 0:
            stamps.write(step, loss.item())
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
