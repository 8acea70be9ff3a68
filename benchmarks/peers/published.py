"""Trains a CIFAR ResNet by its published recipe in PyTorch, in one process.

    PEERS/bin/python -m benchmarks.peers.published --data-dir D                  # resnet20, 64,000 steps
    PEERS/bin/python -m benchmarks.peers.published --data-dir D --device cuda    # with any PyTorch for GPUs

Recipe: He et al. 2015, section 4.2: batches of 128, rate 0.1 and a tenth of it after half and after three quarters of
all steps, momentum 0.9, weight decay 1e-4, 4 pixels of padding, random crops and reflections. Unlike the paper's: one
device computes batch norm over all 128 images; images are standardised by channel; scales, offsets and biases do not
decay; the last batch of an epoch is short. Net, crops and order of examples are those of `benchmarks.peers.ddp`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.peers import torch_resnet
from benchmarks.peers.torch_views import PAD, Windows
from hvd_cifar.data import sampler
from hvd_cifar.data.cifar import CIFAR10, SIDE

BATCH = 128
TEST_BATCH = 1000


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=20, help="6n + 2: 20, 32, 56, ...")
    parser.add_argument("--steps", type=int, default=64_000)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=4000, help="Steps between two evaluations.")
    parser.add_argument("--output", type=Path, help="JSON file for the accuracies.")
    return parser


def main() -> None:
    """Train to the last step; print losses, and accuracies on the test set every --evaluate-every steps."""
    parser = options()
    given = parser.parse_args()
    if given.depth < 8 or (given.depth - 2) % 6:
        parser.error(f"--depth {given.depth}: not 6n + 2; try 20, 32 or 56")
    folder = CIFAR10.locate(given.data_dir)
    if folder is None:
        parser.error(f"--data-dir {given.data_dir}: no CIFAR-10 in its binary layout is there")
    dataset = CIFAR10.read(folder)
    torch.manual_seed(given.seed)
    torch.set_default_device(given.device)
    colours = (dataset.channel_mean, dataset.channel_deviation)
    train, test = (
        Windows(part.images, PAD, "mean", *colours, torch.float32, SIDE) for part in (dataset.train, dataset.test)
    )
    labels, test_labels = (torch.tensor(part.labels.astype(np.int64)) for part in (dataset.train, dataset.test))

    net = torch_resnet.ResNet(given.depth).to(memory_format=torch.channels_last)
    decayed = torch_resnet.kernels(net)
    decayed_ids = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": 1e-4},
        {"params": [p for p in net.parameters() if id(p) not in decayed_ids], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    milestones = [given.steps // 2, given.steps * 3 // 4]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    loss_of, generator = nn.CrossEntropyLoss(), torch.Generator(given.device).manual_seed(given.seed)
    per_epoch = sampler.steps_per_epoch(len(labels), BATCH)
    found: dict[int, float] = {}
    began = time.monotonic()
    indices: Any = None
    for step in range(given.steps):
        epoch, within = divmod(step, per_epoch)
        if within == 0:
            indices = torch.tensor(sampler.epoch_order(given.seed, epoch, len(labels)))
        index = indices[within * BATCH : (within + 1) * BATCH]
        mirrored = torch.rand(len(index), generator=generator) < 0.5
        loss = loss_of(net(train.random(index, mirrored, generator)), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % given.evaluate_every == 0 or step + 1 == given.steps:
            found[step + 1] = accuracy(net, test, test_labels)
            line = f"step {step + 1}: loss {loss.item():.4f}, test accuracy {found[step + 1]:.4f}"
            print(f"{line}, {time.monotonic() - began:.0f} s", flush=True)
    if given.output:
        device = torch.cuda.get_device_name() if given.device == "cuda" else given.device
        facts = {"torch": torch.__version__, "device": device, "tf32": torch.backends.cudnn.allow_tf32}
        facts |= {"depth": given.depth, "steps": given.steps, "seed": given.seed}
        result = {"test_accuracy": found, "seconds": time.monotonic() - began, **facts}
        given.output.write_text(json.dumps(result) + "\n")


def accuracy(net: Any, test: Windows, labels: Any) -> float:
    """Share of the test set that is right, with batch norm's moving statistics."""
    net.eval()
    with torch.no_grad():
        right = [(net(test.middle(index)).argmax(1) == labels[index]).sum() for index in _all(labels)]
    net.train()
    return float(sum(right)) / len(labels)


def _all(labels: Any) -> Any:
    return torch.arange(len(labels)).split(TEST_BATCH)


if __name__ == "__main__":
    main()
