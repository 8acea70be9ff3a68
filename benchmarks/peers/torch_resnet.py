"""The CIFAR ResNets of He et al. 2015 in PyTorch: the same net as `hvd_cifar.models.resnet`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

STAGES = (16, 32, 64)
NORM_MOMENTUM = 0.9  # of the moving statistics: PyTorch's `momentum` is 1 minus this


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """3 x 3, He's initial weights, without bias.

    Keras's "same" at stride 2 pads below and to the right alone; PyTorch's layer pads both sides, which costs the same.
    """
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def norm(width: int) -> nn.Module:
    """Batch norm with scale and offset."""
    return nn.BatchNorm2d(width, eps=1e-5, momentum=1 - NORM_MOMENTUM)


class Block(nn.Module):
    """Two convolutions and a parameter-free shortcut (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.conv1, self.norm1 = conv(inputs, outputs, stride), norm(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs), norm(outputs)

    def forward(self, x: Any) -> Any:
        """[b, inputs, h, w] -> [b, outputs, h / stride, w / stride]."""
        shortcut = x
        if self.more:
            thinned = x[:, :, :: self.stride, :: self.stride]
            shortcut = functional.pad(thinned, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        x = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        return functional.relu(self.norm2(self.conv2(x)) + shortcut, inplace=True)


class ResNet(nn.Module):
    """Images [b, 3, 32, 32] -> logits [b, 10]; depth is 6n + 2."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv, self.norm = conv(3, STAGES[0]), norm(STAGES[0])
        blocks, width = [], STAGES[0]
        for stage, filters in enumerate(STAGES):
            for i in range((depth - 2) // 6):
                blocks.append(Block(width, filters, 2 if stage and not i else 1))
                width = filters
        self.blocks = nn.Sequential(*blocks)
        self.logits = nn.Linear(width, 10)

    def forward(self, images: Any) -> Any:
        """See the class."""
        x = self.blocks(functional.relu(self.norm(self.conv(images)), inplace=True))
        return self.logits(torch.mean(x, dim=(2, 3)))


def kernels(net: Any) -> list[Any]:
    """The weights that decay: those of convolutions and of the last layer, without its bias."""
    return [m.weight for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
