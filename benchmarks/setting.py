"""What measurements share: the check of their data, and the line that names machine, versions and commit."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import click

from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import provenance
from hvd_cifar.runtime import devices


class WrongInput(click.ClickException):
    """One line on stderr, and exit code 2."""

    exit_code = 2


@contextmanager
def one_line_for_users() -> Iterator[None]:
    """Have a UserError end the program as a wrong option does: in one line, with exit code 2."""
    try:
        yield
    except UserError as error:
        raise WrongInput(str(error)) from None


@contextmanager
def folder_of(keep: Path | None) -> Iterator[Path]:
    """The folder `keep`, or one that is removed afterwards."""
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = keep.absolute() if keep else Path(thrown_away)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def real_data(data_dir: Path) -> Path:
    """The folder, absolute. Raises UserError where it holds no CIFAR-10."""
    data_dir = data_dir.expanduser().absolute()
    if CIFAR10.locate(data_dir) is None:
        raise UserError(
            f"--data-dir {data_dir}: no CIFAR-10 in its binary layout is there: name another, or have `train` fetch it"
        )
    return data_dir


def about(**more: str) -> str:
    """Machine, versions and commit in one line, for below a table; `more` are versions of what else took part."""
    told = {"python": platform.python_version()}
    for name in ("tensorflow", "tensorflow_cpu", "keras", "numpy", "horovod"):
        with suppress(metadata.PackageNotFoundError):
            told[name] = metadata.version(name)
    named = ", ".join(f"{name} {version}" for name, version in {**told, **more}.items())
    cpu, cores = devices.processor(Path("/proc/cpuinfo"))[0], os.cpu_count()
    commit = provenance.git_commit() or "unknown"
    return f"{cpu}, {cores} cores, {platform.platform()}; {named}; commit {commit[:8] + commit[40:]}"
