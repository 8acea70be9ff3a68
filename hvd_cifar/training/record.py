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
from hvd_cifar.distributed.batch_norm import local_layers
from hvd_cifar.errors import TrainingError, UserError, reason_of
from hvd_cifar.files import complain, replace_text
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.reporting import provenance
from hvd_cifar.runtime import environment
from hvd_cifar.runtime.ranks import differences
from hvd_cifar.runtime.world import World, lost_rank, versions
from hvd_cifar.training import net_checks, run_dir, user_code
from hvd_cifar.training.callbacks import Run
from hvd_cifar.training.plan import Plan
from hvd_cifar.training.work import UserObjects, Work, bucket_bytes_of, random_layers

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
LONGEST_WHY = 300  # characters of an error in the run's record
NO_BFLOAT16 = (
    "note: --precision mixed_bfloat16: a rank's device has no instructions for it, so steps take about ten times as "
    "long as in float32"
)


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


class Record:
    """What a run records of itself at its start, and compares with the record of a run that it resumes.

    Attributes:
        must_match: facts that must be the same for a run to resume.
        compared: those and the settings that must be the same.
        net: what the ranks have built, from `net_checks.structure`.
    """

    def __init__(self, run: Run, given: UserObjects) -> None:
        """To be made before callbacks are loaded: they do not change a run's course. A collective.

        Raises:
            UserError: on every rank, where ranks have built different nets, or compute too differently.
        """
        work, schedule = run.work, run.schedule
        self._given = given
        self._kernels = agree_on_kernels(run.world, work.settings)
        self.net = net_checks.structure(run)
        net_checks.refuse_unlike(self.net, work.model.name)
        without_callbacks = work.settings.model_copy(update={"callbacks": ()})
        self._of_course = user_code.modules_of(without_callbacks, given.named)
        self.must_match = {
            # The name, not "auto", under which a later evaluation might find another data set.
            "dataset": _name_of_data(work, given),
            "global_batch_size": work.plan.global_batch_size,
            "examples_sha256": collectives.on_root(lambda: work.dataset.train.digest),
            "learning_rate_schedule": collectives.on_every_rank(lambda: schedule.exact),
            "convolutions": self._kernels,
            **numbers_of(work.settings, work.recipe),
        }
        self.compared = compared(work.settings, self.must_match)

    def lines(self, run: Run) -> list[str]:
        """The first lines of a run."""
        return describe(run)

    def write(self, run: Run, newest: Path | None) -> list[str]:
        """Write config.json and copies of the user's files; return notes of what has changed. A collective.

        Args:
            newest: the checkpoint that the run begins with.

        Raises:
            UserError: where the net or the data is not that of the run to resume, or a file cannot be written.
        """
        modules = user_code.modules_of(run.settings, [*self._given.named, *self._given.callbacks])
        facts = {**self.must_match, **self._facts(run)}

        def at_root() -> list[str]:
            changed = []
            if newest:
                _refuse_other_net(run.settings, facts)
                changed = changed_kernels(newest.parent.parent, self._kernels)
            facts["code"] = user_code.keep(run.run_dir, modules, self._of_course)
            named = run.settings.model_copy(update={"dataset": self.must_match["dataset"]})
            write(run.run_dir, named, run.plan, facts)
            return changed

        return collectives.on_root(at_root)

    def _facts(self, run: Run) -> dict[str, Any]:
        """Facts about ranks, data and versions. A collective."""
        world, plan = run.world, run.plan
        return {
            "data": describe_data(run.data),
            "test_sha256": collectives.on_root(lambda: run.data.test.digest),
            "first_step": run.step,
            "total_steps": plan.total_steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "world_size": world.size,
            "hosts": [rank.host for rank in world.ranks],
            "local_ranks": [rank.local_rank for rank in world.ranks],
            "device": world.device,
            "threads": world.threads,
            "controller": world.controller,
            "algorithm": world.algorithm,
            "command": provenance.command(),
            "hvd_cifar": __version__,
            "git_commit": provenance.git_commit() if world.is_root else None,
            "versions": versions(),
            "net": self.net,
            "job": launch.began if (launch := environment.launch()) else None,
        }


def _name_of_data(work: Work, given: UserObjects) -> str:
    """The data set's name for the run's record. An object's name gets a prefix, so that it names no built-in set."""
    if isinstance(given.dataset, Dataset):
        return fields.OBJECT_DATASET + work.dataset.name
    return work.dataset.name if work.settings.dataset == "auto" else work.settings.dataset


def agree_on_kernels(world: World, settings: TrainSettings) -> str:
    """The convolution kernels of all ranks, in words.

    Raises:
        UserError: under --virtual-shards, where hosts compute differently.
    """
    named = differences((rank.host, rank.kernels) for rank in world.ranks)
    if not named:
        return world.ranks[world.rank].kernels
    if settings.virtual_shards:
        raise UserError(
            f"--virtual-shards: hosts compute convolutions differently ({named}), so their bits differ; "
            "set up all alike, set HVD_CIFAR_VECTORS to the smallest, or leave the slower hosts out"
        )
    if world.is_root:
        complain(f"note: hosts compute convolutions differently, results differ by rounding: {named}")
    return named


def write(folder: Path, settings: TrainSettings, plan: Plan, facts: dict[str, Any]) -> None:
    """Write config.json: settings that repeat the run on any number of ranks, and under "run" the facts of this run.

    Raises:
        UserError: where it cannot be written.
    """
    path = folder / "config.json"
    began_from = "auto" if settings.resume == "never" else settings.resume  # "never" would refuse to resume the run
    if facts["first_step"] and path.exists():  # a resumed run keeps the record of where it began
        began_from = run_dir.recorded(path).get("resume", began_from)
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
        content = {**repeatable.model_dump(mode="json"), "run": {"run_dir": str(folder), **facts}}
        replace_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; make room or give another --run-dir") from None


def changed_kernels(folder: Path, now: str) -> list[str]:
    """A note where the run used other convolution kernels before. Under --virtual-shards `claim` refuses that."""
    path = folder / "config.json"
    then = run_dir.recorded(path).get("convolutions", now) if path.exists() else now
    if then == now:
        return []
    return [f"note: convolution kernels changed from {then} to {now}: results differ by rounding"]


def _refuse_other_net(settings: TrainSettings, now: dict[str, Any]) -> None:
    """UserError where the net or the test set is not that of the run to resume. On rank 0.

    Args:
        now: the facts of this start; see `Record.write`.
    """
    origin = run_dir.origin(settings)
    if origin is None or not origin.exists() or settings.changed_code == "accept":
        return
    then = run_dir.recorded(origin)["run"]
    same_keras = then.get("versions", {}).get("keras") == now["versions"]["keras"]
    mine, theirs = ({k: v for k, v in facts.get("net", {}).items() if k != net_checks.RECIPE} for facts in (now, then))
    wrong = net_checks.first_difference(theirs, mine) if same_keras and theirs else None
    if wrong is None and then.get("test_sha256", now["test_sha256"]) != now["test_sha256"]:
        wrong = "the test set"
    names = list(now["data"]["class_names"])
    if wrong is None and then.get("data", {}).get("class_names", names) != names:
        wrong = "the list of class names"
    if wrong:
        raise UserError(
            f"{wrong} is not as in the run in {origin.parent}: give the same code and data, or --changed-code accept, "
            "or another --run-dir"
        )


def describe(run: Run) -> list[str]:
    """The first lines of a run: model, data set, ranks, and the batch arithmetic."""
    settings, batch, net, work = run.settings, run.plan.global_batch_size, run.net, run.work
    world = run.world
    optimizer = getattr(run.optimizer, "inner_optimizer", run.optimizer)  # a loss scale wraps it
    size = bucket_bytes_of(work, net.model)
    micro_batches, shards = settings.gradient_accumulation, settings.virtual_shards
    parts = f"{world.size} ranks x {batch / world.size / micro_batches:g}"
    parts += f" x {micro_batches} micro-batches" * (micro_batches > 1)
    if shards:
        parts = f"{shards} virtual shards, {shards // world.size} on each rank"
    alone = local_layers(net.model) and batch < 2 * work.sampler.micro_batches * world.size
    asked = settings.precision == "mixed_bfloat16"
    slow = asked and any(rank.precision == "float32" for rank in world.ranks)
    drawing = [layer.name for layer in random_layers(net.model)]
    trained = f"{settings.model} ({net.parameters:,} parameters, {settings.precision}) on {work.dataset.name}"
    held = len(work.dataset.validation or ())
    return [
        f"{trained}: {world.describe()}",
        *([f"{held} of {work.plan.examples + held} training examples are held out for evaluation"] if held else []),
        f"global batch {batch} = {parts}; {work.plan.steps_per_epoch} steps an epoch, {work.plan.total_steps} in all",
        f"optimizer {optimizer.name}, learning rate {run.schedule}",
        *([f"gradients leave in buckets of {size / 2**10:.4g} KiB"] if world.size > 1 and size else []),
        *(
            ["note: batch norm takes its statistics over 1 image; give larger batches, or --sync-batch-norm"]
            if alone
            else []
        ),
        *([NO_BFLOAT16] if slow else []),
        *([f"random layers: {', '.join(drawing)}: results depend on the number of ranks"] if drawing else []),
    ]


def why_failed(failure: BaseException) -> str:
    """Why a run failed, in one line for its record."""
    if isinstance(failure, (UserError, TrainingError)):
        return " ".join(str(failure).split())[:LONGEST_WHY]
    if words := lost_rank(failure):
        return f"another rank is lost ({words})"
    return f"{type(failure).__name__}: {reason_of(failure)}"


def describe_data(dataset: Dataset) -> dict[str, Any]:
    """What a run records of its data set, so that its net can be used without the data set."""
    return {
        "image_shape": dataset.image_shape,
        "class_names": dataset.labels_in_words,
        "channel_mean": dataset.channel_mean,
        "channel_deviation": dataset.channel_deviation,
    }


def described_data(facts: dict[str, Any], folder: Path) -> Dataset:
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
            f"{folder}/config.json does not describe the data set; to add that, also where no steps are left: "
            f"./run.sh train --config {folder}/config.json --run-dir {folder}"
        ) from None
