"""What PyTorch's programs share: CIFAR-10 in memory, random views of a batch, groups of weights, the allocator."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from hvd_cifar.data.cifar import CIFAR10

PAD = 4  # pixels on each side: that of `hvd_cifar.data.augment`, which needs more than NumPy
# PyTorch asks for and returns its large buffers in every step; by default glibc hands them back to the kernel, which
# clears them page by page the next time. Here they are kept, and lie in huge pages where the kernel gives them.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
    "MALLOC_TOP_PAD_": str(2**27),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def keep_memory() -> None:
    """Start this program again with `ALLOCATOR`, which is read only at a start; what the user has set stays."""
    missing = {name: value for name, value in ALLOCATOR.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def read_cifar(parser: argparse.ArgumentParser, data_dir: Path) -> Any:
    """The data set of a folder; where there is none, the parser's error ends the program."""
    folder = CIFAR10.locate(data_dir)
    if folder is None:
        parser.error(f"--data-dir {data_dir}: no CIFAR-10 in its binary layout is there")
    return CIFAR10.read(folder)


def decaying(net: Any, decayed: Sequence[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of weights for an optimizer: those that decay, and the others."""
    held = {id(p) for p in decayed}
    others = [p for p in net.parameters() if id(p) not in held]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class Windows:
    """Every window of padded images uint8 [n, 32, 32, 3], as a view: a batch of random crops is one indexing.

    Args:
        mode: of the padding: "reflect", or "mean" for the colour `mean`.
        mean, deviation: of the channels, on the scale 0 to 255.
        window: side of a window, in pixels; by default that of an image.
    """

    def __init__(
        self,
        images: Any,
        pad: int,
        mode: str,
        mean: Sequence[float],
        deviation: Sequence[float],
        dtype: Any,
        window: int | None = None,
    ) -> None:
        planes = torch.as_tensor(images[:]).permute(0, 3, 1, 2)
        n, channels, side, _ = planes.shape
        wide = side + 2 * pad
        padded = torch.empty(n, wide, wide, channels, dtype=torch.uint8)
        if mode == "reflect":
            for part, into in zip(planes.split(5000), padded.split(5000), strict=True):  # float is four times as large
                into.copy_(functional.pad(part.float(), (pad,) * 4, "reflect").permute(0, 2, 3, 1))
        else:
            padded.copy_(torch.tensor(mean).round().to(torch.uint8).expand_as(padded))
            padded[:, pad : pad + side, pad : pad + side] = planes.permute(0, 2, 3, 1)
        window = window or side
        self.dtype = dtype
        self.mean, self.scale = torch.tensor(mean), 1.0 / torch.tensor(deviation)
        row, image = wide * channels, wide * wide * channels
        self.choices = wide - window + 1
        self.windows = padded.as_strided(
            (n, self.choices, self.choices, window, window, channels), (image, row, channels, row, channels, 1)
        )

    def cut(self, index: Any, row: Any, column: Any, mirrored: Any) -> Any:
        """The windows at (row, column), int64 [b] in 0 .. `choices` - 1, mirrored where bool [b].

        Returns:
            uint8 [b, window, window, 3].
        """
        cut = self.windows[index, row, column]
        return torch.where(mirrored[:, None, None, None], cut.flip(2), cut)

    def anywhere(self, index: Any, mirrored: Any, generator: Any) -> Any:
        """`cut` at random places."""
        place = torch.randint(0, self.choices, (2, len(index)), generator=generator)
        return self.cut(index, place[0], place[1], mirrored)

    def middle(self, index: Any) -> Any:
        """The windows in the middle, not mirrored, in the form that `random` returns."""
        here = torch.full_like(index, self.choices // 2)
        return self._standardised(self.cut(index, here, here, torch.zeros_like(index, dtype=torch.bool)))

    def random(self, index: Any, mirrored: Any, generator: Any) -> Any:
        """Windows anywhere: `dtype` [b, 3, window, window], channels last in memory, channels standardised."""
        return self._standardised(self.anywhere(index, mirrored, generator))

    def _standardised(self, cut: Any) -> Any:
        return ((cut.float() - self.mean) * self.scale).to(self.dtype).permute(0, 3, 1, 2)


class Distorted(Windows):
    """Windows with a random contrast, each image standardised: what TensorFlow's tutorial trains on."""

    def random(self, index: Any, mirrored: Any, generator: Any) -> Any:
        """`dtype` [b, 3, window, window], channels last in memory, each image of zero mean and unit variance."""
        x = self.anywhere(index, mirrored, generator).float()
        contrast = 0.2 + 1.6 * torch.rand(len(index), 1, 1, 1, generator=generator)
        channel = x.mean((1, 2), keepdim=True)
        x = (x - channel) * contrast + channel
        variance, mean = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
        least = x[0].numel() ** -0.5  # of a deviation: an image of one colour becomes zeros
        return ((x - mean) / variance.sqrt().clamp(min=least)).to(self.dtype).permute(0, 3, 1, 2)
