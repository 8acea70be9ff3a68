"""An environment and its packages. uv installs them, in a quarter of pip's time, or pip where uv cannot.

uv does not read pip's settings: those that say where packages come from are handed to it. Where pip has a setting that
neither stands here nor is harmless, pip installs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.launch.install.steps import StepFailed, Steps, say

SETTINGS = Path(__file__).parents[3] / "setup.cfg"
# uv's variable for a setting of pip, and what separates its words.
UV_NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
HARMLESS = {"user", "timeout", "default-timeout", "retries", "cache-dir", "disable-pip-version-check", "progress-bar"}
HARMLESS |= {"no-input", "quiet", "verbose", "root-user-action", "require-virtualenv", "break-system-packages"}
DEFAULTS = {
    "UV_COMPILE_BYTECODE": "1",  # as pip does, but on all cores
    "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does: the newest version of all indexes
    "UV_NO_PROGRESS": "1",
    "UV_NO_CONFIG": "1",
}
LIST = (
    "import json, importlib.metadata as m; "
    "print(); print(json.dumps({str(d.metadata['Name']): d.version for d in m.distributions()}))"
)


def install(steps: Steps, python: str, uv: list[str], wanted: list[str], folder: Path) -> None:
    """Install requirements in `folder`, as `pip install` would. Raises StepFailed.

    `uv`: the requirement of uv itself. `wanted`: all others, as words for pip.
    """
    pip = [python, "-I", "-m", "pip"]  # -I: the user's PYTHONPATH must not hide packages from pip
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, cwd=folder)
    settings = pip_settings(listed.stdout)
    unknown = sorted(settings.keys() - UV_NAMES.keys() - HARMLESS)
    reason: object = f"pip's setting {' and '.join(unknown)}"
    if not unknown:
        try:
            steps.run([*pip, "install", *uv], cwd=folder)
            program = [str(Path(python).with_name("uv")), "pip", "install", "--python", python]
            steps.run([*program, *wanted], uv_environment(settings), folder)
            return
        except (StepFailed, OSError) as failure:
            reason = failure
    say(f"\n    pip takes the place of uv: {reason}")
    steps.run([*pip, "install", *wanted], cwd=folder)


def pip_settings(listed: str) -> dict[str, list[str]]:
    """The words of each setting of pip that is not empty. `listed`: the output of `pip config list`."""
    lines = [line.partition("=")[::2] for line in listed.splitlines()]
    found = {}
    for section in ("global.", "install.", ":env:."):  # the last one wins, as for pip
        for name, value in lines:
            if name.startswith(section):
                found[name.removeprefix(section)] = str(ast.literal_eval(value)).split()
    return {name: words for name, words in found.items() if words}


def uv_environment(settings: Mapping[str, list[str]], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables for uv. The user's own for uv stay."""
    given: dict[str, str] = {}
    for option, (variable, separator) in UV_NAMES.items():
        # Where several indexes have a file of the same name, uv takes the first one's, and pip the last one's.
        words = settings.get(option, [])[:: -1 if option == "extra-index-url" else 1]
        given |= {variable: separator.join(words)} if words else {}
    return {**DEFAULTS, **given, **environ}


def requirements(extra: str) -> list[str]:
    """The requirements of an extra in setup.cfg."""
    config = ConfigParser()
    config.read(SETTINGS)
    return [line for line in config["options.extras_require"][extra].splitlines() if line.strip()]


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
