"""Install packages into an environment: with uv, which takes a quarter of pip's time, or with pip where uv cannot.

uv does not read pip's settings, so those that say where packages come from are handed to it. pip installs where its
settings say which kind of file to take: their order counts, and uv does not know it.
"""

import ast
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvd_cifar.launch.install.steps import StepFailed, Steps, say

# uv's variable for each setting of pip that has one.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-cache-dir": "UV_NO_CACHE",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
# pip's settings that say which kind of file to take: wheels or sources.
KINDS_OF_FILE = {"only-binary", "no-binary"}
DEFAULTS = {
    "UV_COMPILE_BYTECODE": "1",  # as pip does, but on all cores
    "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does: the newest version of all indexes
    "UV_NO_PROGRESS": "1",
    "UV_NO_CONFIG": "1",
}


def install(steps: Steps, python: str, uv: list[str], wanted: list[str], held: Path | None, folder: Path) -> None:
    """Install requirements in `folder`, as `pip install` would. Raises StepFailed.

    `uv`: the requirement of uv itself. `wanted`: all others, as words for pip. `held`: a constraints file.
    """
    pip = [python, "-I", "-m", "pip"]  # -I: the user's PYTHONPATH must not hide packages from pip
    constraint = ["--constraint", str(held)] if held else []
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, cwd=folder)
    settings = pip_settings(listed.stdout)
    kinds = sorted(settings.keys() & KINDS_OF_FILE)
    reason: object = f"pip's setting {' and '.join(kinds)}"
    if not kinds:
        try:
            steps.run([*pip, "install", *constraint, *uv], cwd=folder)
            program = [str(Path(python).with_name("uv")), "pip", "install", "--python", python]
            steps.run([*program, *uv_options(settings), *constraint, *wanted], uv_environment(settings), folder)
            return
        except (StepFailed, OSError) as failure:
            reason = failure
    say(f"\n    pip takes the place of uv: {reason}")
    steps.run([*pip, "install", *constraint, *wanted], cwd=folder)


def pip_settings(listed: str) -> dict[str, list[str]]:
    """The words of each setting of pip that is not empty. `listed`: the output of `pip config list`."""
    lines = [line.partition("=")[::2] for line in listed.splitlines()]
    found = {}
    for section in ("global.", "install.", ":env:."):  # the last one wins, as for pip
        for name, value in lines:
            if name.startswith(section):
                found[name.removeprefix(section)] = str(ast.literal_eval(value)).split()
    return {name: words for name, words in found.items() if words}


def uv_options(settings: Mapping[str, list[str]]) -> list[str]:
    """The words for uv of the settings that it has no variable for, or that are added to an option of set-up."""
    no_index = settings.get("no-index", ["no"])[0].lower() in ("1", "true", "yes", "on", "y", "t")
    held = [word for file in settings.get("constraint", []) for word in ("--constraint", file)]
    return ["--no-index"] * no_index + held


def uv_environment(settings: Mapping[str, list[str]], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables for uv. The user's own for uv stay."""
    given = {
        variable: ("," if option == "find-links" else " ").join(settings[option])
        for option, variable in UV_NAMES.items()
        if option in settings
    }
    if "extra-index-url" in settings:
        # Where several indexes have a file of the same name, uv takes the first one's, and pip the last one's.
        given["UV_INDEX"] = " ".join(reversed(settings["extra-index-url"]))
    return {**DEFAULTS, **given, **environ}
