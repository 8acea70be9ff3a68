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


def scaled(number: float, units: Sequence[tuple[str, float]]) -> str:
    """A number in the first unit that it reaches, else in the last, with three digits at least."""
    unit, factor = next((one for one in units if number >= one[1]), units[-1])
    return f"{number / factor:.{0 if number >= 100 * factor else 1}f} {unit}"


def size(number: float) -> str:
    """A number of bytes with a unit."""
    return scaled(number, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)))


def speed(bytes_per_second: float) -> str:
    """A bandwidth in bits per second, with a unit."""
    return scaled(bytes_per_second * 8, (("Gbit/s", 1e9), ("Mbit/s", 1e6)))
