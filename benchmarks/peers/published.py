"""Trains resnet20 by its published recipe in PyTorch, in one process.

    PEERS/bin/python -m benchmarks.peers.published --data-dir D --device cuda    # with any PyTorch for GPUs

Recipe: He et al. 2015, section 4.2: batches of 128, rate 0.1 and a tenth of it after half and after three quarters of
all steps, momentum 0.9, weight decay 1e-4, 4 pixels of padding, random crops and reflections. Unlike the paper's: one
device computes batch norm over all 128 images; images are standardised by channel; scales, offsets and biases do not
decay; the last batch of an epoch is short. Net, crops and order of examples are those of `benchmarks.peers.ddp`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.peers import torch_resnet
from benchmarks.peers.torch_views import PAD, Windows, decaying, read_cifar
from hvd_cifar.data import sampler
from hvd_cifar.data.cifar import SIDE

BATCH = 128
TEST_BATCH = 1000


def main() -> None:
    """Train to the last step; print losses, and accuracies on the test set every --evaluate-every steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=64_000)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--evaluate-every", type=int, default=4000, help="Steps between two evaluations.")
    given = parser.parse_args()
    dataset = read_cifar(parser, given.data_dir)
    torch.manual_seed(0)
    torch.set_default_device(given.device)
    colours = (dataset.channel_mean, dataset.channel_deviation)
    train, test = (
        Windows(part.images, PAD, "mean", *colours, torch.float32, SIDE) for part in (dataset.train, dataset.test)
    )
    labels, test_labels = (torch.tensor(part.labels.astype(np.int64)) for part in (dataset.train, dataset.test))

    net = torch_resnet.ResNet(20).to(memory_format=torch.channels_last)
    groups = decaying(net, torch_resnet.kernels(net), 1e-4)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    milestones = [given.steps // 2, given.steps * 3 // 4]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    loss_of, generator = nn.CrossEntropyLoss(), torch.Generator(given.device).manual_seed(0)
    per_epoch = sampler.steps_per_epoch(len(labels), BATCH)
    began = time.monotonic()
    indices: Any = None
    for step in range(given.steps):
        epoch, within = divmod(step, per_epoch)
        if within == 0:
            indices = torch.tensor(sampler.epoch_order(0, epoch, len(labels)))
        index = indices[within * BATCH : (within + 1) * BATCH]
        mirrored = torch.rand(len(index), generator=generator) < 0.5
        loss = loss_of(net(train.random(index, mirrored, generator)), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % given.evaluate_every == 0 or step + 1 == given.steps:
            told = f"loss {loss.item():.4f}, test accuracy {accuracy(net, test, test_labels):.4f}"
            print(f"step {step + 1}: {told}, {time.monotonic() - began:.0f} s", flush=True)


def accuracy(net: Any, test: Windows, labels: Any) -> float:
    """Share of the test set that is right, with batch norm's moving statistics."""
    net.eval()
    with torch.no_grad():
        parts = torch.arange(len(labels)).split(TEST_BATCH)
        right = [(net(test.middle(index)).argmax(1) == labels[index]).sum() for index in parts]
    net.train()
    return float(sum(right)) / len(labels)


if __name__ == "__main__":
    main()
