"""Install packages into an environment: with uv, which takes a quarter of pip's time, or with pip where uv cannot.

uv does not read pip's settings, so they are handed to it under its own names.
"""

import ast
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvd_cifar.launch.install.steps import StepFailed, Steps, say

# uv's variable for each of pip's settings that says where packages come from or which may be installed.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "no-cache-dir": "UV_NO_CACHE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
DEFAULTS = {
    "UV_COMPILE_BYTECODE": "1",  # as pip does, but on all cores
    "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does: the newest version of all indexes
    "UV_NO_PROGRESS": "1",
    "UV_NO_CONFIG": "1",
}


def install(steps: Steps, python: str, uv: list[str], words: list[str], folder: Path) -> None:
    """Install what `words` ask for, as `pip install` understands them, in `folder`. Raises StepFailed.

    `uv`: the requirement of uv itself.
    """
    pip = [python, "-I", "-m", "pip"]  # -I: the user's PYTHONPATH must not hide packages from pip
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    try:
        steps.run([*pip, "install", *uv])
        environment = uv_environment(listed.stdout)
        # uv takes the option instead of the variable where it has both.
        held = [word for file in environment.pop("UV_CONSTRAINT", "").split() for word in ("--constraint", file)]
        program = [str(Path(python).with_name("uv")), "pip", "install", "--python", python]
        steps.run([*program, *held, *words], environment, folder)
    except (StepFailed, OSError) as failure:
        say(f"without uv ({failure}) ", end="")
        steps.run([*pip, "install", *words], cwd=folder)


def uv_environment(listed: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables for uv. `listed`: the output of `pip config list`. The user's own for uv stay."""
    lines = [line.partition("=")[::2] for line in listed.splitlines()]
    given = {}
    for section in ("global.", "install.", ":env:."):  # the last one wins, as for pip
        for name, value in lines:
            if name.startswith(section) and (option := name[len(section) :]) in UV_NAMES:
                words = str(ast.literal_eval(value)).split()
                given[UV_NAMES[option]] = ("," if option == "find-links" else " ").join(words)
    return {**DEFAULTS, **{name: value for name, value in given.items() if value}, **environ}
