"""Learning rates and batch arithmetic against tables written by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvd_cifar import models
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.errors import UserError
from hvd_cifar.models import resnet
from hvd_cifar.models.recipe import Batch, Recipe
from hvd_cifar.optim.schedules import cosine
from hvd_cifar.training.plan import Plan, changed, global_batch, make_schedule, plan, resolve, set_precision


def _recipe(settings: TrainSettings, size: int) -> Recipe:
    recipe = models.BUILT_IN[settings.model].recipe
    assert recipe is not None
    return changed(recipe.for_batch(global_batch(settings, recipe.batch, size)), settings)


def _resolved(values: dict[str, Any], size: int) -> TrainSettings:
    settings = make(TrainSettings, values)
    return resolve(settings, _recipe(settings, size))


def _plan(settings: TrainSettings, size: int) -> Plan:
    return plan(settings, _recipe(settings, size), 50_000, size)


# The papers' tables: ResNets fall at 32,000 and 48,000 steps of 128; the tutorial every 350 * 50,000 / 128 steps.
RESNET = {0: 0.1, 31_999: 0.1, 32_000: 0.01, 47_999: 0.01, 48_000: 0.001}


@pytest.mark.parametrize(
    ("values", "size", "expected"),
    [
        ({"model": "resnet20", "global_batch_size": 128}, 4, RESNET),
        ({"model": "resnet20", "global_batch_size": 128, "epochs": 163.84}, 1, RESNET),  # of the paper's length
        # A shorter run takes its steps at a half and at three quarters, as 32,000 and 48,000 are of 64,000.
        (
            {"model": "resnet20", "epochs": 3, "global_batch_size": 128},
            1,
            {0: 0.1, 585: 0.1, 586: 0.01, 879: 0.01, 880: 0.001},
        ),
        ({"model": "tutorial"}, 1, {0: 0.1, 136_717: 0.1, 136_718: 0.01, 273_437: 0.001}),
        # A batch of 256 is two of 128: from 0.1 to 0.2 over the 196 steps of the first epoch, however it is dealt.
        ({"model": "resnet20"}, 2, {0: 0.1, 98: 0.15, 196: 0.2, 15_999: 0.2, 16_000: 0.02}),
        # Larger batches have recipes of their own, whose rate grows with the square root above 256.
        ({"model": "tutorial"}, 2, {0: 0.02, 98: 0.02, 68_358: 0.02, 68_359: 0.002}),
        ({"model": "tutorial"}, 64, {0: 0.002}),
        ({"model": "tutorial", "batch_size": 128}, 32, {0: 0.002, 13: 0.004}),
        # A smaller batch takes smaller steps, and needs no warm-up.
        ({"model": "tutorial", "batch_size": 64}, 1, {0: 0.05, 10: 0.05}),
        ({"model": "resnet20", "learning_rate": 0.05, "set": {"warmup_epochs": 0}}, 2, {0: 0.1}),
        ({"model": "resnet20", "gradient_accumulation": 2}, 2, {0: 0.1 * 0.5**0.5}),
        # The user's factor replaces the scaling.
        ({"model": "resnet20", "global_batch_size": 256, "set": {"learning_rate_factor": 1}}, 4, {0: 0.1, 10: 0.1}),
        # A straight line over all epochs, at any number of ranks, also where the run ends before.
        ({"model": "fast"}, 1, {0: 0.24, 98: 0.192, 489: 0.24 / 490}),
        ({"model": "fast", "max_steps": 200}, 5, {0: 0.24, 98: 0.192}),
        # Its rates belong to a batch of 1024.
        ({"model": "fast", "batch_size": 128, "epochs": 4}, 1, {0: 0.03, 782: 0.015}),
        (
            {"model": "fast", "set": {"warmup_epochs": 1}},
            2,
            {0: 0.0, 24: 0.24 * 24 / 49 * (1 - 24 / 490), 49: 0.24 * 441 / 490},
        ),
        # Asked for where nothing is scaled: from 0.
        ({"model": "tutorial", "global_batch_size": 128, "set": {"warmup_epochs": 1}}, 4, {0: 0.0, 391: 0.1}),
    ],
)
def test_learning_rate_of_a_run(values: dict[str, Any], size: int, expected: dict[int, float]) -> None:
    settings = _resolved(values, size)
    schedule = make_schedule(settings, _recipe(settings, size), _plan(settings, size))
    assert {step: schedule(step) for step in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("examples", "batch", "epochs"), [(50_000, 128, 12), (1100, 1024, 164), (129, 128, 164), (99, 99, 1)]
)
def test_a_shorter_run_falls_at_the_same_fractions_of_its_steps(examples: int, batch: int, epochs: int) -> None:
    """Also where most batches are the nearly empty last one of an epoch."""
    settings = _resolved({"model": "resnet20", "global_batch_size": batch, "epochs": epochs}, 1)
    recipe = resnet.PUBLISHED
    made = plan(settings, recipe, examples, 1)
    stairs = make_schedule(settings, recipe, made).decay_steps
    assert [step / made.all_steps for step in stairs] == pytest.approx([0.5, 0.75], abs=0.51 / made.all_steps)
    assert stairs[0] >= 1


def test_a_recipes_own_decay_is_a_function_of_the_part_that_is_done() -> None:
    recipe = Recipe(learning_rate=0.2, schedule=cosine, epochs=4, batch=Batch(reference=1000))
    settings = resolve(make(TrainSettings, {"batch_size": 1000}), recipe)
    schedule = make_schedule(settings, recipe, plan(settings, recipe, 50_000, 1))
    assert [schedule(step) for step in (0, 100, 200)] == pytest.approx([0.2, 0.1, 0.0], abs=1e-12)
    other = Recipe(learning_rate=0.2, schedule=lambda done: 1 - done, epochs=4, batch=Batch(reference=1000))
    changed = make_schedule(settings, other, plan(settings, other, 50_000, 1))
    assert schedule.exact != changed.exact  # a resumed run refuses another decay


@pytest.mark.parametrize(
    ("values", "size", "batch", "steps", "total"),
    [
        ({"epochs": 3}, 1, 128, 391, 1173),
        ({"epochs": 3, "batch_size": 32, "gradient_accumulation": 4}, 2, 256, 196, 588),
        ({"epochs": 3, "max_steps": 100}, 2, 256, 196, 100),
        ({"epochs": 3, "max_steps": 100_000}, 2, 256, 196, 588),
        ({"epochs": 9.9, "global_batch_size": 1024}, 2, 1024, 49, 485),
        ({"epochs": 0.001}, 2, 256, 196, 1),
        ({"epochs": 3}, 64, 1024, 49, 147),  # more ranks share a batch that trains well
        ({"epochs": 3, "gradient_accumulation": 2}, 64, 2048, 25, 75),
        ({"model": "fast"}, 3, 1024, 49, 490),
        ({"model": "fast", "batch_size": 100}, 5, 500, 100, 1000),
    ],
)
def test_batch_arithmetic(values: dict[str, Any], size: int, batch: int, steps: int, total: int) -> None:
    found = _plan(_resolved({"model": "tutorial", **values}, size), size)
    assert (found.global_batch_size, found.steps_per_epoch, found.total_steps) == (batch, steps, total)


def test_all_numbers_of_a_plan() -> None:
    found = _plan(_resolved({"model": "fast", "batch_size": 512, "max_steps": 7}, 4), 4)
    assert found == Plan(50_000, 2048, 25, 7, 250, 2.0, 1.0, 75)
    assert _plan(_resolved({"model": "resnet20"}, 2), 2).warmup_epochs == 1.0
    assert [found.examples_in_step(step) for step in (0, 24, 25)] == [2048, 50_000 - 24 * 2048, 2048]
    steps = {None: 3 * 49, 7: 7, 0: 0}  # between evaluations
    assert {n: _plan(_resolved({"model": "fast", "eval_every": n}, 1), 1).evaluation_steps for n in steps} == steps


@pytest.mark.parametrize(
    ("values", "size", "words"),
    [
        ({"global_batch_size": 3}, 4, "smaller than 4 ranks"),
        (
            {"global_batch_size": 7, "gradient_accumulation": 2},
            4,
            "4 ranks times --gradient-accumulation 2: make it at least 8",
        ),
        ({"batch_size": 30_000}, 2, "larger than the training set"),
        ({"global_batch_size": 7, "virtual_shards": 8}, 2, "smaller than 8 virtual shards: .* at least 8"),
        ({"virtual_shards": 8}, 3, "3 ranks do not divide them; start 1, 2, 4, 8 ranks"),
        ({"virtual_shards": 2}, 4, "start 1, 2 ranks"),
    ],
)
def test_batches_that_do_not_fit_are_refused(values: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        _plan(_resolved(values, size), size)


def test_recipes_fill_in_only_what_is_not_given() -> None:
    plain = _resolved({"model": "tutorial"}, 1)
    recipe = _recipe(plain, 1)
    assert (plain.learning_rate, recipe.weight_decay, recipe.ema_decay, plain.epochs) == (0.1, 0.004, 0.9999, 6)
    assert (plain.deterministic, plain.threads_per_rank) == (False, None)
    exact = _resolved({"virtual_shards": 4}, 1)
    assert (exact.deterministic, exact.threads_per_rank) == (True, 1)
    assert _resolved({"virtual_shards": 4, "threads_per_rank": 3}, 1).threads_per_rank == 3
    values = {"set": {"weight_decay": 0, "ema_decay": 0.5}, "learning_rate": 0.3, "epochs": 7, "global_batch_size": 64}
    given = _resolved({"model": "resnet20", **values}, 1)
    recipe = _recipe(given, 1)
    assert (given.learning_rate, recipe.weight_decay, recipe.ema_decay, given.epochs) == (0.3, 0.0, 0.5, 7)


@pytest.mark.parametrize("wrong", [{"precision": "bfloat16"}, {"ema_decay": 1.0}, {"label_smoothing": 1.0}])
def test_a_recipe_s_values_are_those_that_an_option_could_have(wrong: dict[str, Any]) -> None:
    """A run's config.json could not be read again otherwise."""
    name, value = next(iter(wrong.items()))
    settings = make(TrainSettings, {"model": "tutorial"})
    with pytest.raises(UserError, match=f"--model tutorial: its recipe: --{name.replace('_', '-')} {value}: "):
        resolve(settings, changed(Recipe(**wrong), settings))


def test_precision_and_seed_are_those_of_all_that_keras_makes() -> None:
    def drawn(precision: str | None, seed: int) -> Any:
        set_precision(precision, seed)
        names = keras.config.floatx(), keras.config.dtype_policy().name, keras.layers.Dense(1).name
        return (*names, keras.config.image_data_format()), keras.random.normal((2,), dtype="float32").numpy().tolist()

    keras.config.set_image_data_format("channels_first")
    try:
        for precision, floats, policy in (
            (f"float{64}", "float64", "float64"),  # not the object that a literal is
            ("mixed_bfloat16", "float32", "mixed_bfloat16"),
            (None, "float32", "float32"),
        ):
            about, numbers = drawn(precision, 5)
            assert about == (floats, policy, "dense", "channels_last")
            assert numbers == drawn(precision, 2**32 + 5)[1]
            assert numbers not in (drawn(precision, 6)[1], drawn(precision, 2**31 + 5)[1])
    finally:
        set_precision("float32", 0)


def test_a_batch_of_a_rank_stands_for_the_ranks_of_an_elastic_job() -> None:
    settings = _resolved({"model": "tutorial", "batch_size": 32}, 4)
    recipe = _recipe(settings, 4)
    found = plan(settings, recipe, 50_000, 3, batch_ranks=4)
    assert found == plan(settings, recipe, 50_000, 4) and found.global_batch_size == 128


def test_a_schedule_of_the_users_own() -> None:
    settings = resolve(make(TrainSettings, {}), Recipe())
    made = plan(settings, Recipe(), 50_000, 1)

    def decay(done: float) -> Any:
        return np.float32(1 - done)

    own = make_schedule(settings, Recipe(schedule=decay), made)
    assert type(own(0)) is float and own(0) == pytest.approx(own.peak) and "times 1, " in str(own)
    for wrong in (keras.optimizers.schedules.CosineDecay(0.1, 9), "cosine"):
        with pytest.raises(UserError, match=f"the schedule of its recipe is a {type(wrong).__name__}; give a function"):
            make_schedule(settings, Recipe(schedule=wrong), made)  # type: ignore[arg-type]
