"""The launcher's options, which stand before the command. They import nothing heavy."""

from __future__ import annotations

from typing import Literal, TypeVar

import click
from pydantic import Field, model_validator

from hvd_cifar.errors import UserError
from hvd_cifar.fields import LocalPath, Rests, Settings, Sizes, flags_of, make, option_name, options_of


class HostSettings(Settings):
    """Where ranks run."""

    hostfile: LocalPath | None = None
    """File of hosts, a line `NAME slots=N` each. [default: this machine; in a Slurm job its nodes]"""
    hosts: str | None = Field(None, json_schema_extra={"flags": ["-H", "--hosts"]})
    """The same as NAME:SLOTS,NAME:SLOTS."""
    ranks: int | None = Field(None, gt=0, le=999_999, json_schema_extra={"flags": ["-np", "-n", "--ranks"]})
    """Ranks of the run; they fill one host after the other. [default: all slots; here one per GPU, else per core, at
    most 8]"""
    allreduce: Literal["auto", "ring"] = "auto"
    """`auto`: MPI or NCCL chooses the algorithm."""

    @model_validator(mode="after")
    def _hosts_are_given_once(self: H) -> H:
        if self.hostfile is not None and self.hosts is not None:
            raise ValueError("-H and --hostfile exclude each other: give one of them")
        return self


H = TypeVar("H", bound="HostSettings")


class LaunchSettings(HostSettings):
    """The launcher's options. `./run.sh --help-all` says what they are for."""

    max_restarts: int = Field(0, gt=0)
    validation_ranks: int = Field(0, gt=0)
    elastic: Sizes | None = None
    elastic_timeout: int | None = Field(None, gt=0)
    cool_down: Rests | None = None
    dry_run: bool = Field(False, json_schema_extra={"flags": ["--dry-run"]})

    @model_validator(mode="after")
    def _elastic_jobs_are_consistent(self) -> LaunchSettings:
        if self.elastic is None:
            for name in ("elastic_timeout", "cool_down"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{option_name(name)} goes with --elastic MIN:MAX")
            return self
        least, most = self.elastic
        if self.ranks and not least <= self.ranks <= most:
            raise ValueError(f"-np {self.ranks} is not within --elastic {least}:{most}")
        if self.max_restarts:
            raise ValueError("--elastic starts ranks again by itself: leave --max-restarts out")
        if self.validation_ranks:
            raise ValueError("--elastic and --validation-ranks exclude each other: leave one of them out")
        return self


def launcher_options(argv: list[str]) -> tuple[LaunchSettings, tuple[str, ...]]:
    """The launcher's options at the start of a command line, and the command after them, which may follow "--".

    Raises UserError.
    """
    words = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED)
    rule = {"allow_interspersed_args": False}
    options = [*options_of(LaunchSettings), words]
    parser = click.Command("./run.sh", params=options, add_help_option=False, context_settings=rule)
    try:
        given = parser.make_context("./run.sh", list(argv)).params
    except click.ClickException as error:
        raise UserError(
            f"{error.format_message().rstrip('.')}: options of the launcher stand before the command, and those of "
            "the command after it (./run.sh --help-all)"
        ) from None
    command = given.pop("command")
    return make(LaunchSettings, {name: value for name, value in given.items() if value is not None}), command


def launcher_option(name: str) -> str | None:
    """The launcher's option that a command's parser does not know; None: the launcher does not know it either."""
    flags = (flags_of(LaunchSettings, field) for field in LaunchSettings.model_fields)
    return next((known[0] for known in flags if name in known), None)
