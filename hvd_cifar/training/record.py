"""What a run says and records of itself at its start (config.json), and what of it must be the same to resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hvd_cifar import __version__, fields
from hvd_cifar.config import TrainSettings
from hvd_cifar.data.dataset import Dataset, Examples
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError, reason_of
from hvd_cifar.files import replace_text
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.reporting import provenance
from hvd_cifar.runtime import environment
from hvd_cifar.runtime.ranks import differences
from hvd_cifar.runtime.world import World, lost_rank, versions
from hvd_cifar.training import run_dir, user_code
from hvd_cifar.training.callbacks import Run
from hvd_cifar.training.work import UserObjects, Work, bucket_bytes_of

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
RECIPE = ("weight_decay", "ema_decay", "label_smoothing", "lookahead")
LONGEST_WHY = 300  # characters of an error in the run's record


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


def must_match(work: Work, world: World, schedule: Schedule, given: UserObjects) -> dict[str, Any]:
    """Facts that must be the same for a run to resume. A collective."""
    settings, recipe = work.settings, work.recipe
    # The name, not "auto", under which a later evaluation might find another data set. An object's gets a prefix, so
    # that it names no built-in set.
    is_object, named = isinstance(given.dataset, Dataset), settings.dataset
    return {
        "dataset": fields.OBJECT_DATASET * is_object + work.dataset.name if is_object or named == "auto" else named,
        "global_batch_size": work.plan.global_batch_size,
        "examples_sha256": collectives.on_root(lambda: work.dataset.train.digest),
        "test_sha256": collectives.on_root(lambda: work.dataset.test.digest),
        "learning_rate_schedule": collectives.on_every_rank(lambda: schedule.exact),
        "convolutions": _kernels(settings, world),
        **{name: getattr(recipe, name) for name in RECIPE},
        "image_scales": list(recipe.image_scales),
    }


def facts_of(run: Run) -> dict[str, Any]:
    """Facts about ranks, data and versions, for the record. A collective."""
    world, data = run.world, run.data
    return {
        "data": {  # for the use of the net without the data set: `described_data`
            "image_shape": data.image_shape,
            "class_names": data.labels_in_words,
            "channel_mean": data.channel_mean,
            "channel_deviation": data.channel_deviation,
        },
        "world_size": world.size,
        "hosts": [rank.host for rank in world.ranks],
        "device": world.device,
        "processors": [rank.processor for rank in world.ranks],
        "threads": world.threads,
        "controller": world.controller,
        "command": provenance.command(),
        "hvd_cifar": __version__,
        "git_commit": provenance.git_commit() if world.is_root else None,
        "versions": versions(),
        "job": launch.began if (launch := environment.launch()) else None,
    }


def _kernels(settings: TrainSettings, world: World) -> str:
    """The convolution kernels of all ranks, in words. UserError under --virtual-shards, where they differ."""
    named = _unlike_kernels(world)
    if named and settings.virtual_shards:
        raise UserError(
            f"--virtual-shards: hosts compute convolutions differently ({named}), so their bits differ; "
            "set up all alike, set HVD_CIFAR_VECTORS to the smallest, or leave the slower hosts out"
        )
    return named or world.ranks[world.rank].kernels


def _unlike_kernels(world: World) -> str:
    return differences((rank.host, rank.kernels) for rank in world.ranks)


def write(run: Run, given: UserObjects, compared: dict[str, Any]) -> None:
    """Write config.json and copies of the user's files. A collective. UserError where one cannot be written.

    config.json has settings that repeat the run on any number of ranks, and under "run" the facts of this run.
    """
    modules = user_code.modules_of(run.settings, [given.model, given.dataset, *given.callbacks])
    facts = {**compared, **facts_of(run)}
    collectives.on_root(lambda: _write(run, {**facts, "code": user_code.keep(run.run_dir, modules)}))


def _write(run: Run, facts: dict[str, Any]) -> None:
    path, began_from = run.run_dir / "config.json", run.settings.resume
    if run.step and path.exists():  # a resumed run keeps the record of where it began
        began_from = run_dir.recorded(path).get("resume", began_from)
    repeatable = run.settings.model_copy(
        update={
            "dataset": facts["dataset"],
            "run_dir": None,  # a repetition takes a folder of its own
            "resume": began_from,
            "batch_size": None,  # per rank: another number of ranks would change the global batch
            "global_batch_size": run.plan.global_batch_size,
        }
    )
    try:
        content = {**repeatable.model_dump(mode="json"), "run": {"run_dir": str(run.run_dir), **facts}}
        replace_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; make room or give another --run-dir") from None


def describe(run: Run) -> list[str]:
    """The first lines of a run: model, data set, ranks, and the batch arithmetic."""
    settings, plan, work, world, net = run.settings, run.plan, run.work, run.world, run.net
    batch, shards, micro_batches = plan.global_batch_size, settings.virtual_shards, settings.gradient_accumulation
    if shards:
        parts = f"{shards} virtual shards, {shards // world.size} on each rank"
    else:
        parts = f"{world.size} ranks x {batch / world.size / micro_batches:g}"
        parts += f" x {micro_batches} micro-batches" * (micro_batches > 1)
    optimizer = getattr(run.optimizer, "inner_optimizer", run.optimizer)  # a loss scale wraps it
    lines = [
        f"{settings.model} ({net.parameters:,} parameters, {settings.precision}) on {run.dataset}: {world.describe()}",
        f"global batch {batch} = {parts}; {plan.steps_per_epoch} steps an epoch, {plan.total_steps} in all",
        f"optimizer {optimizer.name}, learning rate {run.schedule}",
    ]
    if held := len(run.data.validation or ()):
        lines.insert(1, f"{held} of {plan.examples + held} training examples are held out for evaluation")
    if world.size > 1 and (size := bucket_bytes_of(work, net.model)):
        lines.append(f"gradients leave in buckets of {size / 2**10:.4g} KiB")
    if named := _unlike_kernels(world):
        lines.append(f"note: hosts compute convolutions differently, results differ by rounding: {named}")
    return lines


def why_failed(failure: BaseException) -> str:
    """Why a run failed, in one line for its record."""
    if isinstance(failure, (UserError, TrainingError)):
        return " ".join(str(failure).split())[:LONGEST_WHY]
    if words := lost_rank(failure):
        return f"another rank is lost ({words})"
    return f"{type(failure).__name__}: {reason_of(failure)}"


def described_data(facts: dict[str, Any], folder: Path) -> Dataset:
    """The data set in the "run" section of config.json, without its examples. UserError where it is not there."""
    try:
        data = facts["data"]
        height, width, channels = map(int, data["image_shape"])
        names = tuple(map(str, data["class_names"]))
        mean, deviation = (tuple(map(float, data[name])) for name in ("channel_mean", "channel_deviation"))
        none = Examples(np.empty((0, height, width, channels), np.uint8), np.empty(0, np.int32))
        return Dataset(str(facts["dataset"]), none, none, len(names), mean, deviation, names)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder}/config.json describes no data set: bring it back, or give another run") from None
