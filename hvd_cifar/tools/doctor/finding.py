"""A finding, and how findings write numbers and lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

Level = Literal["ok", "warning", "failure"]

MIB, GIB = 2**20, 2**30
SET_UP = "./run.sh setup"
SET_UP_ALL = "./run.sh setup --hostfile FILE"
NAMES_SHOWN = 3


class Finding(BaseModel):
    """The result of one check, on one host ("": on all hosts, or between them); `remedy`: what to do."""

    model_config = ConfigDict(frozen=True)

    check: str
    level: Level
    text: str
    host: str = ""
    remedy: str = ""


def some_hosts(names: Sequence[str]) -> str:
    """The name of one host, or the number of several."""
    return names[0] if len(names) == 1 else f"{len(names)} hosts"


def listed(texts: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """The first texts, and the number of the others."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, what: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number} {what}{'s' * (number != 1)}"


def size(number: float) -> str:
    """A number of bytes with a unit."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.{0 if number >= 100 * factor else 1}f} {unit}"
    return f"{number:.0f} bytes"


def seconds(number: float) -> str:
    """A time with a unit."""
    if number >= 100:
        return f"{number:,.0f} s"
    if number >= 1:
        return f"{number:.1f} s"
    return f"{number * 1e3:.2g} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"


def speed(bytes_per_second: float) -> str:
    """A bandwidth in bits per second, with a unit."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"


def ranged(texts: Sequence[str]) -> str:
    """From the first text to the last one."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
