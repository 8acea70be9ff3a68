"""The run directory: its lock, its config.json, and the checks that a resumed run is the same run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from hvd_cifar import config, settings_file
from hvd_cifar.config import TrainSettings
from hvd_cifar.data.dataset import Dataset, Examples
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import read_json
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime import environment
from hvd_cifar.training import checkpoint
from hvd_cifar.training.plan import Plan

SECONDS_FOR_READERS = 0.2  # `reporting.run_files.lives` holds the lock for an instant
SECONDS_FOR_A_LOST_HOST = 150.0  # a file server keeps the lock of a host that does not answer (NFS by default for 90 s)
OF_A_RUN = ("metrics.jsonl", "sessions.jsonl", "examples.jsonl", "summary.json")  # written after config.json
MOST_EARLIER = 50  # starts of a run in its config.json, the newest ones
OF_LAST_START = ("earlier", "data", "net", "code")  # long facts, which are the same in all parts of a run
# Settings that determine a run's results. They must not change when a run resumes, nor must the facts derived from
# settings (data set, batch, learning rate).
MUST_MATCH = (
    "model",
    "precision",
    "seed",
    "hold_out",
    "clip_norm",
    "compression",
    "sync_batch_norm",
    "virtual_shards",
    "deterministic",
)


# Numbers of the recipe that determine a run's results.
RECIPE = ("weight_decay", "ema_decay", "label_smoothing", "lookahead", "image_scales")


def numbers_of(settings: TrainSettings, recipe: Recipe) -> dict[str, Any]:
    """The recipe's numbers that must be the same for a run to resume, as config.json records them."""
    numbers = {name: getattr(recipe, name) for name in RECIPE}
    return {**numbers, "image_scales": list(recipe.image_scales), "augmentation": settings.set.augmentation or "recipe"}


def compared(settings: TrainSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for a run to resume: settings by name, and the `facts` derived from settings."""
    names = list(MUST_MATCH)
    if settings.sync_batch_norm:
        names.append("gradient_accumulation")  # batch norm's statistics are over its micro-batches
    if facts["lookahead"] or facts["image_scales"]:
        names.append("epochs")  # look-ahead's decay and the image sizes follow the steps of all epochs
    if settings.virtual_shards:
        names.append("threads_per_rank")  # the last bits depend on threads and convolution kernels
    else:
        facts = {name: value for name, value in facts.items() if name != "convolutions"}
    kept = settings.model_dump(mode="json")  # as config.json will say it
    return {**{name: kept[name] for name in names}, **facts}


def continue_run(settings: TrainSettings) -> TrainSettings:
    """Settings in which batch and precision, unless the user gave them, are those of the run to resume."""
    names = ["precision"]
    if settings.batch_size is None and settings.global_batch_size is None:
        names += ["global_batch_size"]
    recorded = origin(settings)
    if recorded is None or not os.path.exists(recorded):  # Path.exists may raise
        return settings
    with damage_told(recorded):
        then = settings_file.read_file(recorded)
        missing = {name: then[name] for name in names if getattr(settings, name) is None and name in then}
        return config.make(TrainSettings, {**settings.model_dump(), **missing})


def claim(settings: TrainSettings, recorded: dict[str, Any]) -> tuple[Path, Path | None]:
    """Choose, make and lock the run directory, and find the checkpoint to resume from; for rank 0.

    The lock stays until `release`, also after an error.

    Args:
        recorded: from `course_of`.

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
        if not environment.is_restart():
            raise
        terminal.complain(f"hvd_cifar: waits for {path}, which the lost rank 0 may still hold")
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


def record(run_dir: Path, settings: TrainSettings, plan: Plan, facts: dict[str, Any]) -> None:
    """Write config.json: settings that repeat the run on any number of ranks, and under "run" the facts of this run.

    Raises:
        UserError: where it cannot be written.
    """
    path = run_dir / "config.json"
    earlier = []
    began_from = "auto" if settings.resume == "never" else settings.resume  # "never" would refuse to resume the run
    if facts["first_step"] and path.exists():
        # A resumed run keeps the record of where it began, and the facts of its earlier parts.
        then = recorded(path)
        began_from = then.get("resume", began_from)
        last = {name: value for name, value in then["run"].items() if name not in OF_LAST_START}
        earlier = [*then.get("earlier", []), last][-MOST_EARLIER:]
    repeatable = settings.model_copy(
        update={
            "run_dir": None,  # a repetition takes a folder of its own
            "resume": began_from,
            "changed_code": "refuse",  # each change is accepted once
            "batch_size": None,  # per rank: another number of ranks would change the global batch
            "global_batch_size": plan.global_batch_size,
        }
    )
    try:
        settings_file.write_file(path, repeatable, {"run_dir": str(run_dir), **facts, "earlier": earlier})
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; make room or give another --run-dir") from None


def describe(dataset: Dataset) -> dict[str, Any]:
    """What a run records of its data set, so that its net can be used without the data set."""
    return {
        "image_shape": dataset.image_shape,
        "class_names": dataset.labels_in_words,
        "channel_mean": dataset.channel_mean,
        "channel_deviation": dataset.channel_deviation,
    }


def described(facts: dict[str, Any], run_dir: Path) -> Dataset:
    """The data set that a run has recorded, without its examples.

    Args:
        facts: the "run" section of config.json.

    Raises:
        UserError: where the record lacks it.
    """
    try:
        data = facts["data"]
        height, width, channels = map(int, data["image_shape"])
        names = tuple(map(str, data["class_names"]))
        mean, deviation = (tuple(map(float, data[name])) for name in ("channel_mean", "channel_deviation"))
        none = Examples(np.empty((0, height, width, channels), np.uint8), np.empty(0, np.int32))
        return Dataset(str(facts["dataset"]), none, none, len(names), mean, deviation, names)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{run_dir}/config.json does not describe the data set; to add that, also where no steps are left: "
            f"./run.sh train --config {run_dir}/config.json --run-dir {run_dir}"
        ) from None


def as_learnt(given: Dataset, learnt: Dataset, any_size: bool) -> Dataset:
    """A set to evaluate, with the classes and channel statistics that the run's net has learnt.

    Args:
        learnt: the run's data set.
        any_size: whether the run's transforms are the user's own, which may take images of any size.

    Raises:
        UserError: where the set has images of another size, or other classes.
    """
    known, named = learnt.labels_in_words, given.class_names
    if given.image_shape != learnt.image_shape and not any_size:
        theirs, own = (" x ".join(map(str, shape)) for shape in (given.image_shape, learnt.image_shape))
        raise UserError(
            f"data set {given.name}: its images are {theirs} and the run's {own} (height x width x channels): "
            "give a set with images of the run's size"
        )
    is_named = bool(named) and known != tuple(map(str, range(learnt.classes)))
    if given.classes > learnt.classes or is_named and named != known[: len(named)]:
        theirs, own = (", ".join(names[:3]) for names in (given.labels_in_words, known))
        raise UserError(
            f"data set {given.name}: its classes ({theirs}, ...) are not the run's, in their order ({own}, ...): "
            "give a set with the same classes"
        )
    return replace(
        given,
        classes=learnt.classes,
        class_names=learnt.class_names,
        channel_mean=learnt.channel_mean,
        channel_deviation=learnt.channel_deviation,
    )


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


def changed_kernels(run_dir: Path, now: str) -> list[str]:
    """A note where the run used other convolution kernels before. Under --virtual-shards `claim` refuses that."""
    path = run_dir / "config.json"
    then = recorded(path).get("convolutions", now) if path.exists() else now
    if then == now:
        return []
    return [f"note: convolution kernels changed from {then} to {now}: results differ by rounding"]


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
        raise UserError(f"{path} is damaged ({reason_of(failure)}): give another --run-dir") from None


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """A block that reads settings from a run's config.json: what is wrong in them is told as that file's, not --config.

    Raises:
        UserError: where the file is damaged.
    """
    try:
        yield
    except UserError as failure:
        why = str(failure).removeprefix(f"--config {path}: ").partition(";")[0]
        raise UserError(f"{path} is damaged ({why}): bring it back, or give another run") from None


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
