"""The command and the commit of a run, so that others can repeat it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import hvd_cifar


def command() -> str:
    """The command line of this rank, quoted for a shell."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def git_commit(package: Path = Path(hvd_cifar.__file__).parent) -> str | None:
    """The commit of a package's code, with "-dirty" where files have changed since; None: not known."""
    try:
        # An installed copy may be inside the checkout of another project, whose commit must not be reported.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        changed = "-dirty" if _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".") else ""
        return _git(package, "rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()
