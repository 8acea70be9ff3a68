"""The net of TensorFlow's CIFAR-10 tutorial in PyTorch: the same net as `hvd_cifar.models.tutorial`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH = 64  # channels of both convolutions
NEIGHBOURS = 9  # channels that a response is normalised over
ALPHA = 0.001  # of their mean square


def _filled(layer: Any, deviation: float, bias: float) -> Any:
    """The layer with the tutorial's initial weights: a normal distribution cut off at two deviations."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    nn.init.constant_(layer.bias, bias)
    return layer


def _pool(x: Any) -> Any:
    """3 x 3 at stride 2; an even side is padded below and to the right alone, as TensorFlow's "same" does."""
    return functional.max_pool2d(x, 3, 2, ceil_mode=True)


class _Response(torch.autograd.Function):
    """x / s^0.75 with s = 1 + alpha * (x^2 @ band), and its gradient in few passes: 0.6 of autograd's time."""

    @staticmethod
    def forward(context: Any, x: Any, band: Any) -> Any:
        rows = x.permute(0, 2, 3, 1)  # no copy where channels lie last in memory
        sums = (rows.square() @ band).mul_(ALPHA / NEIGHBOURS).add_(1)
        context.save_for_backward(x, band, sums)
        root = sums.rsqrt()
        return root.mul_(root.sqrt()).mul_(rows).permute(0, 3, 1, 2)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        x, band, sums = context.saved_tensors
        rows = x.permute(0, 2, 3, 1)
        root = sums.rsqrt()
        scaled = root.mul_(root.sqrt()).mul_(gradients[0].permute(0, 2, 3, 1))
        others = (scaled * rows).div_(sums) @ band
        return scaled.sub_(others.mul_(rows).mul_(1.5 * ALPHA / NEIGHBOURS)).permute(0, 3, 1, 2), None


class Normalization(nn.Module):
    """Local response normalisation by a banded matrix of ones, with its gradient written out: a fraction of the time of
    `nn.LocalResponseNorm` on a CPU. It computes in float32, also under autocast, as that layer does."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.ones(WIDTH, WIDTH)
        band = torch.triu(torch.tril(ones, NEIGHBOURS // 2), -(NEIGHBOURS // 2))
        self.register_buffer("band", band, persistent=False)

    def forward(self, x: Any) -> Any:
        """[b, 64, h, w] -> the same shape and type."""
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float() if x.dtype == torch.bfloat16 else x
            return _Response.apply(wide, self.band).to(x.dtype)


class Tutorial(nn.Module):
    """Images [b, 3, 24, 24] -> logits [b, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _filled(nn.Conv2d(3, WIDTH, 5, padding=2), 0.05, 0.0)
        self.conv2 = _filled(nn.Conv2d(WIDTH, WIDTH, 5, padding=2), 0.05, 0.1)
        self.local3 = _filled(nn.Linear(6 * 6 * WIDTH, 384), 0.04, 0.1)
        self.local4 = _filled(nn.Linear(384, 192), 0.04, 0.1)
        self.logits = _filled(nn.Linear(192, 10), 1 / 192, 0.0)
        self.norm = Normalization()

    def forward(self, images: Any) -> Any:
        """See the class."""
        x = self.norm(_pool(functional.relu(self.conv1(images), inplace=True)))
        x = _pool(self.norm(functional.relu(self.conv2(x), inplace=True)))
        x = x.permute(0, 2, 3, 1).flatten(1)  # rows, columns, channels, as in TensorFlow
        x = functional.relu(self.local3(x), inplace=True)
        return self.logits(functional.relu(self.local4(x), inplace=True))


def decayed(net: Any) -> list[Any]:
    """The weights that decay: those of the two local layers."""
    return [net.local3.weight, net.local4.weight]
