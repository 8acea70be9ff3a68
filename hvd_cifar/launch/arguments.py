"""The command lines of the launcher and of set-up. Standard library only: set-up runs on a bare Python."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import parse_hosts, read_hostfile


class Parser(argparse.ArgumentParser):
    """argparse with `-H` and `--hostfile`. An error raises a UserError of one line, instead of ending the process."""

    def __init__(self, usage: str) -> None:
        """`usage`: one line, shown with each error."""
        super().__init__(usage=usage, add_help=False, allow_abbrev=False)
        self.add_argument("-H", dest="hosts", type=parse_hosts, action=_Once, default=())
        self.add_argument("--hostfile", dest="hosts", type=Path, action=_Once)
        self.set_defaults(hostfile=None)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message.removeprefix('argument ')} ({self.usage})")


class _Once(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if getattr(namespace, self.dest):
            raise UserError("-H and --hostfile exclude each other, and each is given once")
        if isinstance(values, Path):
            namespace.hostfile, values = values, read_hostfile(values, counts_cores=False)
        setattr(namespace, self.dest, values)
