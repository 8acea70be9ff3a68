"""Checks of a job before any rank starts, since a start takes 10 s or more.

Ranks repeat the checks: they may run on other hosts, and know more, such as the number of examples and the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_cifar import config, fields
from hvd_cifar.config import DataSettings, TrainSettings
from hvd_cifar.errors import UserError
from hvd_cifar.fields import FOLDER_DATASET
from hvd_cifar.files import can_be_replaced
from hvd_cifar.use_settings import EvaluateSettings, ExportSettings, RunSettings

MOST_THREADS_OF_A_CORE = 4  # many more would make the machine unusable
# Peak of a rank's own memory (USS) in the smallest run: tutorial, batch 1, one thread, 2 ranks: 303 MiB. `fast` takes
# 874 MiB.
LEAST_BYTES_OF_A_RANK = 300 << 20


def check(settings: Any, ranks: int, *, sees_files: bool, on_gpus: bool, warn: Callable[[str], None]) -> None:
    """Check a command's settings and, if rank 0 runs on this host, the files and folders that they name.

    Args:
        settings: of any command.
        ranks: of the job.
        sees_files: whether rank 0 runs on this host.
        on_gpus: whether ranks may compute on GPUs.
        warn: called with one line.

    Raises:
        UserError: where the job cannot run.
    """
    if isinstance(settings, TrainSettings):
        config.check_ranks(settings, ranks)
    if getattr(settings, "precision", None) == "mixed_float16" and not on_gpus:
        warn("note: --precision mixed_float16 is slow on a CPU; for speed give mixed_bfloat16 or float32")
    if not sees_files:
        return
    threads, cores = getattr(settings, "threads_per_rank", None) or 1, os.cpu_count() or 1
    if threads > MOST_THREADS_OF_A_CORE * cores:
        raise UserError(
            f"--threads-per-rank {threads}: this host has {cores} cores; give at most {MOST_THREADS_OF_A_CORE * cores}"
        )
    if isinstance(settings, DataSettings):
        _check_data(settings, ranks)
        _check_code(settings)
    if isinstance(settings, TrainSettings):
        run_dir = settings.run_dir or Path("runs").absolute()
        check_folder(run_dir, f"--run-dir {run_dir}")
        if settings.resume not in ("auto", "never") and not any(map(os.path.exists, _places(settings.resume))):
            raise UserError(f"--resume {settings.resume}: no checkpoint is there; give auto, never, or its path")
    if isinstance(settings, RunSettings):
        _check_run(settings)
    if isinstance(settings, EvaluateSettings):
        _check_outputs(settings)
    if isinstance(settings, ExportSettings):
        check_folder(settings.to, f"--to {settings.to}")


def check_memory(ranks: int, available: int) -> None:
    """UserError where `ranks` on this host need more than the `available` bytes of memory."""
    if ranks * LEAST_BYTES_OF_A_RANK > available:
        raise UserError(
            f"{ranks} ranks on this host need at least {ranks * LEAST_BYTES_OF_A_RANK / 2**30:.1f} GiB of memory, and "
            f"{available / 2**30:.1f} GiB are free: start at most {available // LEAST_BYTES_OF_A_RANK} here (-np)"
        )


def check_folder(path: Path, what: str) -> None:
    """UserError unless a folder can be written or made. The message begins with `what`."""
    nearest = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
    if not os.path.isdir(nearest):
        raise UserError(f"{what}: {nearest} is not a folder; give another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{what}: {nearest} cannot be written; give another, or allow writing there")


def _places(resume: str) -> tuple[str, str]:
    return resume, f"{resume}.index"  # the second: of an earlier version, for which ranks have another message


def _check_data(settings: DataSettings, ranks: int) -> None:
    named, data_dir = settings.dataset, settings.data_dir
    if named.startswith(FOLDER_DATASET):
        path = Path(named.removeprefix(FOLDER_DATASET))
        if not os.path.isdir(path):
            raise UserError(
                f"--dataset {named}: there is no such folder; give one with train/CLASS/*.png and test/CLASS/*.png"
            )
        return
    if fields.is_user_code(named):
        return
    from hvd_cifar.data.cifar import CIFAR10, CIFAR100  # NumPy takes 0.2 s to import

    layout = CIFAR100 if named == CIFAR100.name else CIFAR10  # the synthetic set has CIFAR-10's layout
    if isinstance(settings, TrainSettings):
        per_rank = (settings.batch_size or 0) * settings.gradient_accumulation
        batch, examples = settings.global_batch_size or per_rank * ranks, layout.train_examples
        examples -= min(examples, settings.hold_out or 0)
        if batch > examples:
            raise UserError(
                f"the global batch of {batch} is larger than the training set of {examples}: give a smaller "
                f"--{'global-' * bool(settings.global_batch_size)}batch-size"
            )
    found = None if named == "synthetic" else layout.locate(data_dir)
    if found is not None:
        layout.check(found)
    else:
        check_folder(data_dir, f"--data-dir {data_dir}")


def _check_code(settings: DataSettings) -> None:
    """UserError where the file of a FILE.py:NAME does not exist."""
    named = [("--dataset", settings.dataset), ("--model", getattr(settings, "model", ""))]
    named += [("--callbacks", spec) for spec in getattr(settings, "callbacks", ())]
    for option, spec in named:
        place = spec.rpartition(":")[0]
        if place.endswith(".py") and not os.path.isfile(place):
            raise UserError(f"{option} {spec}: there is no such file; correct the path")


def _check_run(settings: RunSettings) -> None:
    if not os.path.isfile(settings.run_dir / "config.json"):
        raise UserError(f"{settings.run_dir}: there is no run (no config.json); give the folder of a run")
    if settings.checkpoint is not None and not any(map(os.path.exists, _places(str(settings.checkpoint)))):
        raise UserError(f"--checkpoint {settings.checkpoint}: no checkpoint is there; give its path")


def _check_outputs(settings: EvaluateSettings) -> None:
    output = settings.output
    if output is None:
        return
    if os.path.isdir(output):
        raise UserError(f"--output {output}: is a folder; give a file")
    if not os.path.isdir(output.parent):
        raise UserError(f"--output {output}: there is no folder {output.parent}; make it, or give another file")
    if not can_be_replaced(output):
        raise UserError(f"--output {output}: it is no regular file; give another file")
    check_folder(output.parent, f"--output {output}")
