"""The environment of the peers that need PyTorch: a folder of its own, never this project's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from hvd_cifar.errors import UserError

TORCH = "2.13.0"  # what docs/benchmarks.md names; builds differ in what follows a "+"
REQUIREMENTS = (f"torch=={TORCH}", "numpy>=2,<3")
ASK = "import json, numpy, torch; print(json.dumps({'torch': torch.__version__, 'numpy': numpy.__version__}))"


def ensure(folder: Path) -> Path:
    """The Python of an environment with this version of PyTorch; made in `folder` if there is none.

    pip's own settings say where packages come from, such as an index of builds without GPU support.

    Raises:
        UserError: where it cannot be made.
    """
    if folder.resolve() == Path(sys.prefix).resolve():
        raise UserError(f"--environment {folder}: it is this project's own; give another folder")
    python = folder / "bin" / "python"
    if python.exists() and versions(python).get("torch", "").split("+")[0] == TORCH:
        return python
    click.echo(f"making an environment with {', '.join(REQUIREMENTS)} in {folder}", err=True)
    for words in ([sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", *REQUIREMENTS]):
        done = subprocess.run(words, stdout=sys.stderr)
        if done.returncode:
            raise UserError(f"{' '.join(words)} failed: see above; or give another folder: --environment")
    return python


def versions(python: Path) -> dict[str, str]:
    """What an environment has, by name; nothing where it lacks PyTorch or NumPy."""
    found = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True)
    return dict(json.loads(found.stdout)) if found.returncode == 0 else {}
