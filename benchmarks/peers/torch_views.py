"""CIFAR-10 in memory as PyTorch sees it, uint8, and random views of a batch in a few whole-batch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional


class Windows:
    """Every [32, 32] window of padded images, as a view: a batch of random crops is one indexing.

    Args:
        images: uint8 [n, 32, 32, 3].
        pad: pixels on each side.
        mode: of the padding: "reflect", or "mean" for the colour `mean`.
        mean, deviation: of the channels, on the scale 0 to 255.
    """

    def __init__(
        self, images: Any, pad: int, mode: str, mean: Sequence[float], deviation: Sequence[float], dtype: Any
    ) -> None:
        planes = torch.as_tensor(np.asarray(images)).permute(0, 3, 1, 2)
        n, channels, side, _ = planes.shape
        wide = side + 2 * pad
        padded = torch.empty(n, wide, wide, channels, dtype=torch.uint8)
        if mode == "reflect":
            for part, into in zip(planes.split(5000), padded.split(5000), strict=True):  # float is four times as large
                into.copy_(functional.pad(part.float(), (pad,) * 4, "reflect").permute(0, 2, 3, 1))
        else:
            padded.copy_(torch.tensor(mean).round().to(torch.uint8).expand_as(padded))
            padded[:, pad : pad + side, pad : pad + side] = planes.permute(0, 2, 3, 1)
        self.pad, self.dtype = pad, dtype
        self.mean, self.scale = torch.tensor(mean), 1.0 / torch.tensor(deviation)
        row, image = wide * channels, wide * wide * channels
        choices = 2 * pad + 1
        self.windows = padded.as_strided(
            (n, choices, choices, side, side, channels), (image, row, channels, row, channels, 1)
        )

    def cut(self, index: Any, row: Any, column: Any, mirrored: Any) -> Any:
        """The windows at (row, column), int64 [b] in 0 .. 2 pad, mirrored where bool [b].

        Returns:
            `dtype` [b, 3, 32, 32], channels last in memory, standardised.
        """
        cut = self.windows[index, row, column]
        cut = torch.where(mirrored[:, None, None, None], cut.flip(2), cut)
        return ((cut.float() - self.mean) * self.scale).to(self.dtype).permute(0, 3, 1, 2)

    def middle(self, index: Any) -> Any:
        """The images as they are, as `cut` gives them."""
        here = torch.full_like(index, self.pad)
        return self.cut(index, here, here, torch.zeros_like(index, dtype=torch.bool))

    def random(self, index: Any, mirrored: Any, generator: Any) -> Any:
        """Windows anywhere."""
        place = torch.randint(0, 2 * self.pad + 1, (2, len(index)), generator=generator)
        return self.cut(index, place[0], place[1], mirrored)
