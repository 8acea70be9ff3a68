"""The versions of an environment's packages: listed, written as a constraints file for pip, compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

# Not from a package index: the checkout itself, and Horovod, which each host builds from the same source.
OWN = ("hvd-cifar", "horovod")
LIST = (
    "import json, importlib.metadata as m; "
    "print(); print(json.dumps({str(d.metadata['Name']): d.version for d in m.distributions()}))"
)


def versions_of(run: Callable[[str], str]) -> dict[str, str]:
    """Version by package. `run` runs a program with the environment's Python, and returns its output."""
    listed: dict[str, str] = json.loads(last_line(run(LIST)))
    return {plain(name): version for name, version in listed.items()}


def last_line(said: str) -> str:
    """The last line of a program's output: a login shell prints before it."""
    return said.strip().rpartition("\n")[2]


def as_constraints(packages: Mapping[str, str]) -> str:
    """The text of a file for pip's --constraint option."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()) if name not in OWN)


def read_constraints(path: Path) -> dict[str, str]:
    """Version by package, from a constraints file."""
    found = {}
    for line in path.read_text().splitlines():
        name, pinned, version = re.split(r"[;#]", line)[0].partition("==")
        if pinned:
            found[plain(name.strip())] = version.strip()
    return found


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Packages that both have in different versions, like "numpy 2.4.6, not 2.4.5"."""
    return [
        f"{name} {found[name]}, not {version}"
        for name, version in sorted(wanted.items())
        if name in found and found[name] != version and name not in ("pip", "setuptools", "uv")
    ]


def plain(name: str) -> str:
    """A package's name, normalised as by package indexes (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
