"""The numbers of a run, from its settings and its recipe: defaults, batch arithmetic, learning rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import keras

from hvd_cifar import config
from hvd_cifar.config import RecipeChanges, TrainSettings
from hvd_cifar.data import sampler
from hvd_cifar.errors import UserError
from hvd_cifar.fields import DEFAULT_PER_RANK_BATCH_SIZE, S
from hvd_cifar.models.recipe import Batch, Recipe
from hvd_cifar.optim.schedules import Schedule, Staircase


@dataclass(frozen=True)
class Plan:
    """The batch arithmetic of a run."""

    examples: int  # in the training set
    global_batch_size: int  # examples per step over all ranks and micro-batches
    steps_per_epoch: int  # including the last one, which may have fewer examples
    total_steps: int  # the run ends after them
    all_steps: int  # of all epochs, even where --max-steps ends the run earlier
    learning_rate_factor: float  # multiplies the recipe's learning rate, for the global batch
    warmup_epochs: float  # over which the learning rate rises; 1 by default where it is scaled up
    evaluation_steps: int  # between evaluations; 0: only at the end

    def examples_in_step(self, step: int) -> int:
        """Examples of the global batch at a global step, counted from 0 over all epochs."""
        return sampler.examples_in_step(self.examples, self.global_batch_size, step)


def threads_of(settings: TrainSettings) -> int | None:
    """Threads of a rank; None: its share of the cores.

    One under --virtual-shards, since the last bits of a sum depend on how threads split it.
    """
    return settings.threads_per_rank or (1 if settings.virtual_shards else None)


def is_deterministic(settings: TrainSettings) -> bool:
    """Whether the run uses deterministic operations and adds gradients in a fixed order."""
    return bool(settings.deterministic or settings.virtual_shards)


def changed(recipe: Recipe, settings: TrainSettings) -> Recipe:
    """The recipe with the changes of --set. UserError where a number of a user's recipe is not possible."""
    _checked(RecipeChanges, {name: getattr(recipe, name) for name in RecipeChanges.model_fields}, settings)
    return replace(recipe, **settings.set.model_dump(exclude_none=True))


def resolve(settings: TrainSettings, recipe: Recipe) -> TrainSettings:
    """Settings with the recipe's values instead of None, except values that depend on ranks or machines.

    UserError where an option could not have the recipe's value: config.json could not be read again.
    """
    defaults = {
        "epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "precision": recipe.precision,
        "threads_per_rank": threads_of(settings),
    }
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    made = _checked(TrainSettings, settings.model_dump() | missing, settings)
    return made.model_copy(update={"deterministic": is_deterministic(settings)})


def _checked(kind: type[S], values: dict[str, Any], settings: TrainSettings) -> S:
    try:
        return config.make(kind, values)
    except UserError as error:
        raise UserError(f"--model {settings.model}: its recipe: {error}") from None


def plan(settings: TrainSettings, recipe: Recipe, examples: int, size: int, batch_ranks: int | None = None) -> Plan:
    """The batch arithmetic of resolved settings, for `examples` to train on and `size` ranks.

    `batch_ranks` is the number of ranks that turns --batch-size into a global batch, by default `size`. UserError where
    a micro-batch would be empty, the global batch exceeds the training set, or the warm-up is longer than the run.
    """
    try:
        config.check_warmup(recipe.warmup_epochs, settings.epochs)  # again, since they may be the recipe's
    except ValueError as failure:
        raise UserError(str(failure)) from None
    whole = global_batch(settings, recipe.batch, batch_ranks or size)
    config.check_ranks(settings.model_copy(update={"global_batch_size": whole}), size)
    if whole > examples:
        raise UserError(
            f"the global batch of {whole} is larger than the training set of {examples}: give a smaller "
            f"--{'global-' * bool(settings.global_batch_size)}batch-size"
        )
    steps = sampler.steps_per_epoch(examples, whole)
    assert settings.epochs is not None, "settings are resolved"
    total = max(1, round(steps * settings.epochs))
    factor = recipe.learning_rate_factor or recipe.batch.scale_of(whole)
    warmup_epochs = recipe.warmup_epochs if recipe.warmup_epochs is not None else float(factor > 1)
    return Plan(
        examples=examples,
        global_batch_size=whole,
        steps_per_epoch=steps,
        total_steps=min(total, settings.max_steps or total),
        all_steps=total,
        learning_rate_factor=factor,
        warmup_epochs=warmup_epochs,
        evaluation_steps=recipe.evaluation_epochs * steps if settings.eval_every is None else settings.eval_every,
    )


def global_batch(settings: TrainSettings, batch: Batch, ranks: int) -> int:
    """Examples per step over all ranks, from the settings or else the recipe."""
    if settings.global_batch_size:
        return settings.global_batch_size
    if settings.batch_size:
        return settings.batch_size * ranks * settings.gradient_accumulation
    if batch.is_global:
        return batch.reference
    examples = DEFAULT_PER_RANK_BATCH_SIZE * ranks
    return min(examples, batch.largest or examples) * settings.gradient_accumulation


def make_schedule(settings: TrainSettings, recipe: Recipe, batch_plan: Plan) -> Schedule:
    """The learning rate of resolved settings: scaled by the batch, warmed up, then with the recipe's decay."""
    assert settings.learning_rate is not None, "settings are resolved"
    assert settings.epochs is not None, "settings are resolved"
    decay, all_steps = recipe.schedule, batch_plan.all_steps
    of_keras = isinstance(decay, keras.optimizers.schedules.LearningRateSchedule)  # is called with a step's number
    if of_keras or not (callable(decay) or isinstance(decay, Staircase)):
        raise UserError(
            f"--model {settings.model}: the schedule of its recipe is a {type(decay).__name__}; give a function of the "
            "finished part of the training, from 0 to 1, that returns a factor"
        )
    stairs: tuple[int, ...] = ()
    if isinstance(decay, Staircase):
        stairs = tuple(examples // batch_plan.global_batch_size for examples in decay.examples)
        full = decay.full_examples
        if full and settings.epochs * batch_plan.examples < full:
            # A shorter run shrinks the staircase: at the full rate its last weights would still move far in each step.
            # Counted in steps: in a small set the last batch of each epoch may be far from full.
            stairs = tuple(max(1, round(all_steps * examples / full)) for examples in decay.examples)
    warmup_steps = round(batch_plan.warmup_epochs * batch_plan.steps_per_epoch)
    base = settings.learning_rate if batch_plan.learning_rate_factor > 1 else 0.0
    peak = settings.learning_rate * batch_plan.learning_rate_factor
    return Schedule(
        base=base if warmup_steps else peak,
        peak=peak,
        warmup_steps=warmup_steps,
        decay_steps=stairs,
        decay=decay.factor if isinstance(decay, Staircase) else 1.0,
        shape=decay if callable(decay) else None,
        shape_steps=all_steps,
    )


def set_precision(precision: str | None, seed: int) -> None:
    """Set dtypes, order of dimensions and seed of all later Keras objects, and restart the numbering of their names."""
    keras.utils.clear_session(free_memory=False)  # layers of a second run in this process are numbered from 0 again
    keras.config.set_floatx("float64" if precision == "float64" else "float32")  # the dtype of an optimizer's scalars
    keras.config.set_dtype_policy(precision or "float32")  # floatx does not change a policy that is already in use
    keras.config.set_image_data_format("channels_last")  # the user's keras.json may say otherwise
    keras.utils.set_random_seed(seed % 2**32)
