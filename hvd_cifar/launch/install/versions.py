"""An environment, and the versions of its packages."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

LIST = (
    "import json, importlib.metadata as m; "
    "print(); print(json.dumps({str(d.metadata['Name']): d.version for d in m.distributions()}))"
)


@dataclass(frozen=True)
class Environment:
    """What set-up builds for. `folder`: site-packages; `packages`: version by name."""

    folder: Path
    packages: Mapping[str, str]
    abi: str = f"{sysconfig.get_config_var('EXT_SUFFIX')} {sysconfig.get_platform()}"  # of this Python, as there

    @property
    def tensorflow(self) -> str:
        """Package and version, such as "tensorflow-cpu 2.21.0"."""
        name = next(name for name in ("tensorflow-cpu", "tensorflow") if name in self.packages)
        return f"{name} {self.packages[name]}"


def environment_in(venv: Path) -> Environment:
    """The environment in a folder."""
    python = str(venv / "bin" / "python")
    packages = versions_of(lambda program: subprocess.check_output([python, "-I", "-c", program], text=True))
    return Environment(next(venv.glob("lib/python3*/site-packages")), packages)


def versions_of(run: Callable[[str], str]) -> dict[str, str]:
    """Version by package. `run` runs a program with the environment's Python, and returns its output."""
    listed: dict[str, str] = json.loads(last_line(run(LIST)))
    return {plain(name): version for name, version in listed.items()}


def last_line(said: str) -> str:
    """The last line of a program's output: a login shell prints before it."""
    return said.strip().rpartition("\n")[2]


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
