"""The run directory: its lock, its config.json, and the checks that a resumed run is the same run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hvd_cifar import config
from hvd_cifar.config import TrainSettings
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import complain, read_json
from hvd_cifar.runtime import environment
from hvd_cifar.training import checkpoint

SECONDS_FOR_READERS = 0.2  # `reporting.run_files.lives` holds the lock for an instant
SECONDS_FOR_A_LOST_HOST = 150.0  # a file server keeps the lock of a host that does not answer (NFS by default for 90 s)
OF_A_RUN = ("metrics.jsonl", "sessions.jsonl", "examples.jsonl", "summary.json")  # written after config.json


def continue_run(settings: TrainSettings) -> TrainSettings:
    """Settings in which batch and precision, unless the user gave them, are those of the run to resume."""
    names = ["precision"]
    if settings.batch_size is None and settings.global_batch_size is None:
        names += ["global_batch_size"]
    path = origin(settings)
    if path is None or not os.path.exists(path):  # Path.exists may raise
        return settings
    then = settings_of_run(path, names)  # of these alone: net and data set may have been Python objects
    missing = {name: getattr(then, name) for name in names if getattr(settings, name) is None}
    return settings.model_copy(update=missing)


def claim(settings: TrainSettings, recorded: dict[str, Any]) -> tuple[Path, Path | None]:
    """Choose, make and lock the run directory, and find the checkpoint to resume from; for rank 0.

    The lock stays until `release`, also after an error.

    Args:
        recorded: what must be the same; see `record.compared`.

    Raises:
        UserError: where the folder is in use, not writable, or of another run.
    """
    run_dir = settings.run_dir or config.unused_run_dir(settings.model)
    try:
        # Not by os.path.exists: a folder that cannot be read for a moment is not new, and must not be removed below.
        is_new = not run_dir.exists()
        foreign = [name for name in OF_A_RUN if (run_dir / name).exists()]
        if foreign and not (run_dir / "config.json").exists():
            raise UserError(
                f"--run-dir {run_dir}: holds {foreign[0]}, but no config.json of a run; give another folder"
            )
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = _locked(run_dir / ".lock")
    except Timeout:
        raise UserError(
            f"--run-dir {run_dir}: another run is writing there; wait for it, or give another one"
        ) from None
    except OSError as failure:
        raise UserError(f"--run-dir {run_dir}: {failure.strerror}; give a folder that can be written") from None
    _held.append(lock)
    try:
        return run_dir, _checkpoint_to_resume(settings, run_dir, recorded)
    except UserError:
        if is_new:  # a run that cannot begin leaves no folder
            release()
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _locked(path: Path) -> FileLock:
    """The file's lock, taken. After a restart by the launcher this waits for the lock of a lost rank 0.

    Raises Timeout where another process keeps it.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=SECONDS_FOR_READERS)
    except Timeout:
        if not ((launch := environment.launch()) and launch.restarts):
            raise
        complain(f"waits for {path}, which the lost rank 0 may still hold")
        lock.acquire(timeout=SECONDS_FOR_A_LOST_HOST)
    return lock


def _checkpoint_to_resume(settings: TrainSettings, run_dir: Path, recorded: dict[str, Any]) -> Path | None:
    """The checkpoint that a run in this folder begins with, or None. UserError where the folder has another run."""
    if settings.resume == "never":
        if checkpoint.listed_for_user(run_dir):
            raise UserError(f"--run-dir {run_dir} already has a run; give another one, or --resume auto to go on")
        return None
    own = checkpoint.find(run_dir)
    if settings.resume == "auto" or _began_from(run_dir, settings.resume, own):
        _refuse_differences(run_dir, recorded)  # even without a checkpoint: a killed run may have none
        return own
    given = _given(settings.resume)
    if own is None:
        # The learning rate may differ. These may not, since the checkpoint's step counts the batches that they define.
        names = ("model", "precision", "dataset", "examples_sha256", "seed", "global_batch_size")
        _refuse_differences(given.parent.parent, {name: recorded[name] for name in names})
        return given
    if given.parent != own.parent:
        raise UserError(f"--run-dir {run_dir} already has a run; give another one to start from {given}")
    if given != own:
        raise UserError(
            f"--resume {given}: this run has gone on to {own.name}; give another --run-dir to go back, or --resume auto"
        )
    _refuse_differences(run_dir, recorded)
    return own


_held: list[FileLock] = []  # of run directories that this process has claimed


def release() -> None:
    """Release the run directories that this process has claimed; only rank 0 has any."""
    while _held:
        _held.pop().release()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What summary.json holds; empty where there is none."""
    try:
        found = read_json(run_dir / "summary.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def touch_summary(run_dir: Path) -> None:
    """Show the launcher that the summary holds for this start too (`launch.job.Starter.proof`)."""
    with suppress(OSError):
        os.utime(run_dir / "summary.json")


def origin(settings: TrainSettings) -> Path | None:
    """The config.json of the run to resume: the run directory's own, or that of the checkpoint to start from."""
    own = settings.run_dir / "config.json" if settings.run_dir else None
    if settings.resume == "never":
        return None
    if settings.resume == "auto" or (own is not None and os.path.exists(own)):
        return own
    return _listed(settings.resume)[0].parent.parent / "config.json"


def _began_from(run_dir: Path, place: str, own: Path | None) -> bool:
    """Whether the run in a folder started from the checkpoint `place` of another run, and has one of its `own`."""
    path = run_dir / "config.json"
    return own is not None and path.exists() and recorded(path).get("resume") == place


def _given(place: str) -> Path:
    _listed(place)
    path = checkpoint.find(Path(place))
    assert path is not None, "some are listed"
    return path


def _listed(place: str) -> list[Path]:
    found = checkpoint.listed_for_user(Path(place))
    if not found:
        raise UserError(f"--resume {place}: no checkpoint is there; give auto, never, or a checkpoint's path")
    return found


def recorded(path: Path) -> dict[str, Any]:
    """The content of a run directory's config.json: its settings, and the facts of its "run" section at the same level.

    Raises:
        UserError: where the file is damaged.
    """
    try:
        content = read_json(path)
        return {**content, **content["run"], "run": content["run"]}
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise UserError(f"{path} is damaged ({reason_of(failure)}): bring it back, or give another run") from None


def settings_of_run(path: Path, names: Iterable[str] = TrainSettings.model_fields, **changes: Any) -> TrainSettings:
    """The settings of these names in a run directory's config.json, with changes by name.

    Raises:
        UserError: where the file is damaged.
    """
    content = recorded(path)
    values = {name: content[name] for name in names if name in content}
    try:
        return config.make(TrainSettings, {**values, **changes})
    except UserError as failure:
        raise UserError(f"{path} is damaged ({failure}): bring it back, or give another run") from None


def _differences_of(path: Path, now: dict[str, Any]) -> list[str]:
    """What differs between a run directory's config.json and `now`, in words.

    Raises:
        UserError: where the file is damaged.
    """
    defaults = {name: field.default for name, field in TrainSettings.model_fields.items()}
    then = {**defaults, **recorded(path)}  # the record of an older run lacks newer settings; it had their defaults
    changed = [name for name in now if name in then and then[name] != now[name]]
    return [f"{name.replace('_', ' ')} was {then[name]}, is {now[name]}" for name in changed]


def _refuse_differences(run_dir: Path, now: dict[str, Any]) -> None:
    """UserError where the run has other settings than `now`. Without config.json nothing is compared."""
    path = run_dir / "config.json"
    changed = _differences_of(path, now) if path.exists() else []
    if changed:
        raise UserError(
            f"the run in {run_dir} has other settings ({'; '.join(changed)}): give the same ones, or none but "
            f"--config {path}, or another --run-dir"
        )
