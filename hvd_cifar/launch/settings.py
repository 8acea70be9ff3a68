"""Settings of the launcher: its options stand before the command. They import nothing heavy."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field, model_validator

from hvd_cifar.fields import LocalPath, Rests, Settings, Sizes, option_name


class HostSettings(Settings):
    """Where ranks run."""

    hostfile: LocalPath | None = Field(
        None, description="File of hosts, a line `NAME slots=N` each. [default: this machine; in a Slurm job its nodes]"
    )
    hosts: str | None = Field(
        None, description="The same as NAME:SLOTS,NAME:SLOTS.", json_schema_extra={"flags": ["-H", "--hosts"]}
    )
    ranks: int | None = Field(
        None,
        gt=0,
        le=999_999,
        description="Ranks of the run; they fill one host after the other. [default: all slots; here one per GPU, "
        "else per core, at most 8]",
        json_schema_extra={"flags": ["-np", "-n", "--ranks"]},
    )
    allreduce: Literal["auto", "ring"] = Field("auto", description="`auto`: MPI or NCCL chooses the algorithm.")

    @model_validator(mode="after")
    def _hosts_are_given_once(self: H) -> H:
        if self.hostfile is not None and self.hosts is not None:
            raise ValueError("-H and --hostfile exclude each other: give one of them")
        return self


H = TypeVar("H", bound="HostSettings")


class LaunchSettings(HostSettings):
    """The launcher's options, which stand before the command."""

    max_restarts: int = Field(0, gt=0, description="Start a failed job again from its newest checkpoint, N times.")
    validation_ranks: int = Field(0, gt=0, description="Ranks that evaluate while the others train.")
    elastic: Sizes | None = Field(None, description="MIN:MAX ranks: continue without lost ranks, with added ones.")
    elastic_timeout: int | None = Field(None, gt=0, description="Seconds to wait for enough ranks. [default: 600]")
    cool_down: Rests | None = Field(None, description="FIRST:LONGEST seconds of rest after a loss. [default: 10:300]")
    dry_run: bool = Field(
        False,
        description="Print the command that starts the ranks, and do not run it.",
        json_schema_extra={"flags": ["--dry-run"]},
    )

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
