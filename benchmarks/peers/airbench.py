"""The airbench94 recipe in PyTorch: the wall-clock peer of `--model fast`.

    PEERS/bin/python -m benchmarks.peers.airbench --data-dir D --seed 0

Written from Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU", with the constants of the paper and of its
code. Runs in the peers' environment (torch and numpy); `python -m benchmarks.peers` makes it.

On a GPU the original holds the weights in half precision. Here they are float32, and convolutions take and give
bfloat16 by autocast. bfloat16 has three mantissa bits less than half precision: weights in it would lose most late
updates to rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.torch_views import Windows, keep_memory, read_cifar

MEAN = tuple(255 * m for m in (0.4914, 0.4822, 0.4465))
DEVIATION = tuple(255 * d for d in (0.2470, 0.2435, 0.2616))
BATCH = 1024
EPOCHS = 9.9
WIDTHS = (64, 256, 256)
WHITENED = 24  # filters of the first layer: a 2 x 2 x 3 patch has 12 directions, each with both signs
WHITENING_IMAGES = 5000
WHITENING_EPSILON = 5e-4
WHITENING_BIAS_EPOCHS = 3  # epochs in which the first layer's bias learns; its kernel never learns
NORM_MOMENTUM = 0.6  # of the moving statistics: PyTorch's `momentum` is 1 minus this
NORM_EPSILON = 1e-12
LOGIT_SCALE = 1 / 9
RATE = 11.5  # for 1,024 examples, before the division by the momentum's amplification
WEIGHT_DECAY = 0.0153  # for 1,024 examples, whatever the learning rate
MOMENTUM = 0.85
BIAS_FACTOR = 64.0  # of the learning rate of batch norm's biases
SMOOTHING = 0.2
START, PEAK_AT, END = 0.2, 0.23, 0.07  # of the learning rate's triangle: first factor, place of the peak, last factor
LOOK_AHEAD_STEPS = 5
LOOK_AHEAD_DECAY = 0.95**5
TRANSLATE = 2  # pixels
TEST_BATCH = 2000
LOG_EVERY = 10  # steps


def norm(width: int) -> nn.Module:
    """Batch norm without a scale that learns."""
    layer = nn.BatchNorm2d(width, eps=NORM_EPSILON, momentum=1 - NORM_MOMENTUM)
    layer.weight.requires_grad_(False)
    return layer


def conv(inputs: int, outputs: int) -> nn.Module:
    """3 x 3 without bias; the first filters hand their inputs on (partial identity, section 3.3 of the paper)."""
    layer = nn.Conv2d(inputs, outputs, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def block(inputs: int, outputs: int) -> nn.Module:
    """[b, inputs, h, w] -> [b, outputs, h / 2, w / 2]."""
    first = [conv(inputs, outputs), nn.MaxPool2d(2), norm(outputs), nn.GELU()]
    return nn.Sequential(*first, conv(outputs, outputs), norm(outputs), nn.GELU())


class Net(nn.Module):
    """Images [b, 3, 32, 32] -> logits [b, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, WHITENED, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        self.blocks = nn.Sequential(*(block(i, o) for i, o in zip((WHITENED, *WIDTHS), WIDTHS, strict=False)))
        self.logits = nn.Linear(WIDTHS[-1], 10, bias=False)

    def forward(self, images: Any) -> Any:
        """See the class."""
        x = self.blocks(functional.gelu(self.whiten(images)))
        return self.logits(functional.max_pool2d(x, 3).flatten(1)) * LOGIT_SCALE


def whitening_filters(images: Any) -> Any:
    """Filters [24, 3, 2, 2] after which the patches of images [n, 3, h, w] are uncorrelated, of unit variance."""
    patches = functional.unfold(images.float(), 2).transpose(1, 2).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / torch.sqrt(values + WHITENING_EPSILON)).T.flip(0).reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters])


def rate_factor(step: int, total: int) -> float:
    """The triangle of the learning rate, 1 at its peak."""
    peak = int(total * PEAK_AT)
    if step < peak:
        return START + (1 - START) * step / peak
    return 1 + (END - 1) * (step - peak) / (total - peak)


def make_optimizer(net: Any) -> Any:
    """Nesterov SGD over sums of losses, from the decoupled settings (section 3.1 of the paper)."""
    amplification = BATCH * (1 + 1 / (1 - MOMENTUM))  # of a constant gradient, in steps of the sum over a batch
    rate, decay = RATE / amplification, WEIGHT_DECAY * BATCH / amplification
    biases = [m.bias for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    held = {id(p) for p in biases}
    others = [p for p in net.parameters() if p.requires_grad and id(p) not in held]
    groups = [
        {"params": biases, "lr": rate * BIAS_FACTOR, "weight_decay": decay / (rate * BIAS_FACTOR)},
        {"params": others, "lr": rate, "weight_decay": decay / rate},
    ]
    return torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM, nesterov=True, fused=True)


class LookAhead:
    """A slow copy of weights and moving statistics, towards which both are moved together (section 3.4)."""

    def __init__(self, net: Any) -> None:
        self.fast = [v for v in net.state_dict().values() if v.is_floating_point()]
        self.slow = [v.clone() for v in self.fast]

    def update(self, decay: float) -> None:
        """slow <- decay * slow + (1 - decay) * fast; fast <- slow."""
        for slow, fast in zip(self.slow, self.fast, strict=True):
            slow.lerp_(fast, 1 - decay)
            fast.copy_(slow)


@torch.inference_mode()
def predict(net: Any, images: Any, views: int) -> Any:
    """Logits of images [b, 3, 32, 32] as the mean of one view, or the weighted mean of six."""

    def look(x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return net(x.contiguous(memory_format=torch.channels_last)).float()

    def look_twice(x: Any) -> Any:
        return (look(x) + look(x.flip(3))) / 2

    if views == 1:
        return look(images)
    padded = functional.pad(images, (1, 1, 1, 1), "reflect")
    moved = (look_twice(padded[:, :, :32, :32]) + look_twice(padded[:, :, 2:, 2:])) / 2
    return (look_twice(images) + moved) / 2


def accuracy(net: Any, part: Any, views: int) -> float:
    """Share of a whole set that is right."""
    images = Windows(part.images, 0, "mean", MEAN, DEVIATION, torch.bfloat16)
    labels = torch.tensor(part.labels.astype(np.int64))
    net.eval()
    parts = torch.arange(len(labels)).split(TEST_BATCH)
    return sum((predict(net, images.middle(i), views).argmax(1) == labels[i]).sum().item() for i in parts) / len(labels)


def main() -> None:
    """Train, evaluate, and print what came out."""
    keep_memory()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_default_device(given.device)
    torch.manual_seed(given.seed)

    dataset = read_cifar(parser, given.data_dir)
    train_set = dataset.train

    began = time.perf_counter()
    images = Windows(train_set.images, TRANSLATE, "reflect", MEAN, DEVIATION, torch.bfloat16)
    labels = torch.tensor(train_set.labels.astype(np.int64))
    net = Net()
    net.whiten.weight.data[:] = whitening_filters(images.middle(torch.arange(WHITENING_IMAGES)))
    net = net.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(net)
    base = [group["lr"] for group in optimizer.param_groups]
    ahead = LookAhead(net)
    loss_of = nn.CrossEntropyLoss(label_smoothing=SMOOTHING, reduction="sum")
    generator = torch.Generator(given.device).manual_seed(given.seed)
    mirrored_first = torch.rand(len(labels), generator=generator) < 0.5
    per_epoch = len(labels) // BATCH  # the ragged last batch is left out, as in the original
    total = math.ceil(per_epoch * EPOCHS)
    order: Any = None
    for step in range(total):
        epoch, within = divmod(step, per_epoch)
        if within == 0:
            order = torch.randperm(len(labels), generator=generator)
            net.whiten.bias.requires_grad_(epoch < WHITENING_BIAS_EPOCHS)
        index = order[within * BATCH : (within + 1) * BATCH]
        mirrored = mirrored_first[index] ^ bool(epoch % 2)  # of any two epochs, each image is mirrored in one
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * rate_factor(step, total)
        optimizer.zero_grad()
        with torch.autocast(given.device, torch.bfloat16):
            logits = net(images.random(index, mirrored, generator))
        loss = loss_of(logits.float(), labels[index])
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % LOOK_AHEAD_STEPS == 0:
            ahead.update(LOOK_AHEAD_DECAY * (done / total) ** 3)
        if done == total:
            ahead.update(1.0)
        if done % LOG_EVERY == 0 or done == total:
            seconds = time.perf_counter() - began
            rate = done * BATCH / seconds
            print(f"step {done} of {total}: loss {loss.item() / BATCH:.4f}, {seconds:.1f} s, {rate:.0f} images/s")
    seconds = round(time.perf_counter() - began, 2)
    found = {"test_accuracy_six_views": accuracy(net, dataset.test, 6), "test_accuracy": accuracy(net, dataset.test, 1)}
    print(json.dumps({**found, "training_seconds": seconds, "steps": total, **vars(given)}, default=str))


if __name__ == "__main__":
    main()
