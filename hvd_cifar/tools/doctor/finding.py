"""A finding, and how findings write numbers and lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "failure"]

SET_UP = "./run.sh setup"
SET_UP_ALL = "./run.sh setup --hostfile FILE"
NAMES_SHOWN = 3


class Finding(NamedTuple):
    """What a check found, on one host ("": on all, or between them); `remedy`: what to do."""

    level: Level
    host: str
    text: str
    remedy: str = ""
    check: str = ""


def listed(texts: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """The first texts, and the number of the others."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, what: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number} {what}{'s' * (number != 1)}"


def ranged(texts: Sequence[str]) -> str:
    """From the first text to the last one."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def size(number: float) -> str:
    """A number of bytes with a unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.{0 if number >= 100 * factor else 1}f} {unit}"
    return f"{number:.0f} bytes"


def seconds(number: float) -> str:
    """A time with a unit."""
    if number >= 1:
        return f"{number:.1f} s"
    return f"{number * 1e3:.2g} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"


def speed(bytes_per_second: float) -> str:
    """A bandwidth in bits per second, with a unit."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
