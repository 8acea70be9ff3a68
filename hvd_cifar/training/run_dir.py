"""The run directory: its lock, its config.json, and the checks that a resumed run is the same run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hvd_cifar import config, fields
from hvd_cifar.config import TrainSettings
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import complain, read_json
from hvd_cifar.runtime import environment
from hvd_cifar.training import checkpoint

SECONDS_FOR_A_LOST_HOST = 150.0  # a file server keeps the lock of a host that does not answer (NFS by default for 90 s)
OF_A_RUN = ("metrics.jsonl", "sessions.jsonl", "examples.jsonl", "summary.json")  # written after config.json
# Facts that the state of a checkpoint depends on: its step counts the batches that they define.
OF_A_STATE = ("model", "precision", "dataset", "examples_sha256", "seed", "global_batch_size")


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


def claim(settings: TrainSettings, facts: dict[str, Any]) -> tuple[Path, Path | None]:
    """Choose, make and lock the run directory, and find the checkpoint to resume from; for rank 0.

    It stays so until `release`, also after an error. UserError where the folder is in use, not writable, or of
    another run. `facts`: what must be the same; see `record.compared`.
    """
    run_dir = settings.run_dir or config.unused_run_dir(settings.model)
    try:
        # Not by os.path.exists: a folder that cannot be read for a moment is not new, and must not be removed.
        is_new = not run_dir.exists()
        foreign = [name for name in OF_A_RUN if (run_dir / name).exists()]
        foreign += [path.name for path in checkpoint.listed(run_dir / "checkpoints")]
        if foreign and not (run_dir / "config.json").exists():
            raise UserError(
                f"--run-dir {run_dir}: holds {foreign[0]}, but no config.json of a run; give another folder"
            )
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        _held.append((_locked(run_dir / ".lock"), run_dir if is_new else None))
    except Timeout:
        raise UserError(
            f"--run-dir {run_dir}: another run is writing there; wait for it, or give another one"
        ) from None
    except OSError as failure:
        raise UserError(f"--run-dir {run_dir}: {failure.strerror}; give a folder that can be written") from None
    return run_dir, _checkpoint_to_resume(settings, run_dir, facts)


def _locked(path: Path) -> FileLock:
    """The file's lock, taken; Timeout where another process keeps it. A restart waits for the lock of a lost rank 0."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not ((launch := environment.launch()) and launch.restarts):
            raise
        complain(f"waits for {path}, which the lost rank 0 may still hold")
        lock.acquire(timeout=SECONDS_FOR_A_LOST_HOST)
    return lock


def _checkpoint_to_resume(settings: TrainSettings, run_dir: Path, facts: dict[str, Any]) -> Path | None:
    """The checkpoint that a run in this folder begins with, or None. UserError where the folder has another run."""
    own, path = checkpoint.find(run_dir), run_dir / "config.json"
    if settings.resume == "auto" or (own and recorded(path).get("resume") == settings.resume):
        if path.exists():  # even without a checkpoint: a killed run may have none
            _refuse_differences(path, facts)
        return own
    record = _given(settings.resume)[0].parent.parent / "config.json"
    if own is not None:
        raise UserError(f"--run-dir {run_dir} already has a run; give another one to start from {settings.resume}")
    _refuse_differences(record, {name: facts[name] for name in OF_A_STATE})  # others may change
    return checkpoint.find(Path(settings.resume))


_held: list[tuple[FileLock, Path | None]] = []  # of run directories that this process has claimed; the new folder


def release() -> None:
    """Release the run directories that this process has claimed; only rank 0 has any.

    A new one without config.json is removed: a run that cannot begin leaves no folder.
    """
    while _held:
        lock, new = _held.pop()
        lock.release()
        if new and not (new / "config.json").exists():
            shutil.rmtree(new, ignore_errors=True)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What summary.json holds; empty where there is none."""
    try:
        found = read_json(run_dir / "summary.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def origin(settings: TrainSettings) -> Path | None:
    """The config.json of the run to resume: the run directory's own, or that of the checkpoint to start from."""
    own = settings.run_dir / "config.json" if settings.run_dir else None
    if settings.resume == "auto" or (own is not None and os.path.exists(own)):
        return own
    return _given(settings.resume)[0].parent.parent / "config.json"


def _given(place: str) -> list[Path]:
    """The checkpoints of --resume PATH, the newest first; not checked."""
    found = checkpoint.listed_for_user(Path(place))
    if not found:
        raise UserError(f"--resume {place}: no checkpoint is there; give auto or a checkpoint's path")
    return found


def recorded(path: Path) -> dict[str, Any]:
    """The settings and facts of a run directory's config.json, at one level. UserError where the file is damaged."""
    try:
        content = read_json(path)
        return {**content, **content["run"], "run": content["run"]}
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise _damaged(path, reason_of(failure)) from None


def settings_of_run(path: Path, names: Iterable[str] = TrainSettings.model_fields, **changes: Any) -> TrainSettings:
    """Settings of a run directory's config.json, with changes by name. UserError where the file is damaged."""
    content = recorded(path)
    values = {name: content[name] for name in names if name in content}
    try:
        return config.make(TrainSettings, {**values, **changes})
    except UserError as failure:
        raise _damaged(path, failure) from None


def _damaged(path: Path, why: object) -> UserError:
    return UserError(f"{path} is damaged ({why}): bring it back, or give another run")


def _without_folder(name: str, value: Any) -> Any:
    """A net or data set without the place of its file or folder, which may move: digests compare the examples."""
    if name == "dataset" and str(value).startswith(fields.FOLDER_DATASET):
        return fields.FOLDER_DATASET
    is_file = name in ("model", "dataset") and fields.is_user_code(str(value))
    return Path(value).name if is_file else value


def _refuse_differences(path: Path, now: dict[str, Any]) -> None:
    """UserError where the run with the config.json at `path` has other settings or facts than `now`."""
    defaults = {name: field.default for name, field in TrainSettings.model_fields.items()}
    then = {**defaults, **recorded(path)}  # the record of an older run lacks newer settings; it had their defaults
    changed = [
        f"{name.replace('_', ' ')} was {then[name]}, is {now[name]}"
        for name in now
        if name in then and _without_folder(name, then[name]) != _without_folder(name, now[name])
    ]
    if changed:
        raise UserError(
            f"the run in {path.parent} has other settings ({'; '.join(changed)}): give the same ones, or none but "
            f"--config {path}, or another --run-dir"
        )
