"""Whatever is registered in a `TrainState` survives each way in which a state moves."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cifar.distributed.collectives import pack, unpack
from hvd_cifar.training.checkpoint import restore, values_of, write
from hvd_cifar.training.state import Kind, TrainState

Part = tuple[list[tuple[tuple[int, ...], str]], Kind]  # shapes and types of its variables, and its kind

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TYPES = st.sampled_from(["float32", "float64", "int64", "bfloat16", "bool", "uint8"])
VARIABLES = st.lists(st.tuples(SHAPES, TYPES), min_size=1, max_size=3)
PARTS = st.lists(st.tuples(VARIABLES, st.sampled_from(["shared", "own", "root"])), max_size=4)


def _state(parts: Sequence[Part], seed: int) -> TrainState:
    """A state with these parts added, and other values in every variable for another seed."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    state = TrainState(model, optimizer)
    for number, (variables, kind) in enumerate(parts):
        made = [
            keras.Variable(np.zeros(shape), dtype=dtype, trainable=False, name=f"v{i}")
            for i, (shape, dtype) in enumerate(variables)
        ]
        state.add(f"part{number}", made, kind)
    draw = np.random.default_rng(seed)
    for variable in state.variables:
        variable.assign(np.asarray(draw.integers(0, 2 if variable.dtype == "bool" else 100, variable.shape)))
    return state


def _bits(state: TrainState) -> list[bytes]:
    return [np.asarray(v.numpy()).tobytes() for v in state.variables]


@settings(max_examples=15)
@given(PARTS, PARTS)
def test_what_is_registered_survives_a_checkpoint(parts: list[Part], more: list[Part]) -> None:
    """A part that it lacks stays as it is; one that is gone is passed over."""
    saved, other = _state(parts, 1), _state([*parts, *more], 2)
    lacking = _bits(other)[len(saved.variables) :]
    with tempfile.TemporaryDirectory() as folder:
        restore(other, write(Path(folder), 5, values_of(saved)))
        assert _bits(other) == [*_bits(saved), *lacking]
        other.step.assign(6)
        restore(saved, write(Path(folder), 6, values_of(other)))
    assert _bits(saved) == _bits(other)[: len(saved.variables)]


@settings(max_examples=15)
@given(PARTS)
def test_what_is_registered_survives_a_copy_in_memory(parts: list[Part]) -> None:
    state = _state(parts, 1)
    variables = [getattr(v, "value", v) for v in state.variables]
    content, before = pack(variables).numpy(), _bits(state)
    for variable in state.variables:
        variable.assign(np.zeros(variable.shape))
    unpack(content, variables)
    assert _bits(state) == before


def test_each_kind_is_compared_and_averaged_as_it_says() -> None:
    state = TrainState(keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()]))
    shared, own, root = (keras.Variable(0.0, name=kind) for kind in ("shared", "own", "root"))
    state.add("shared", [shared])
    state.add("own", [own], "own")
    state.add("root", [root], "root")
    statistics: list[Any] = state.model.non_trainable_variables
    state.declare_own(statistics)

    def has(variables: list[Any], one: Any) -> bool:
        return any(one is v for v in variables)

    for late in (False, True):
        compared = state.replicated(with_own=late)
        assert has(compared, shared) and not has(compared, root)
        assert has(compared, own) == has(compared, statistics[0]) == late
    assert len(state.own) == len(statistics) + 1 and has(state.variables, root)
    with pytest.raises(ValueError, match="has a part shared already"):
        state.add("shared", [])


def test_own_variables_are_averaged_once_a_step_and_come_back_after_a_save_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each average rounds. What all ranks have got from one of them is the same already."""
    state = TrainState(keras.Sequential([keras.Input((2,))]))
    own = keras.Variable(1.0, name="own")
    state.add("own", [own], "own")
    averaged: list[list[Any]] = []

    def average(variables: list[Any]) -> None:
        averaged.append(variables)
        own.assign(own + 10.0)

    monkeypatch.setattr("hvd_cifar.training.state.average_variables", average)
    monkeypatch.setattr("hvd_cifar.distributed.collectives.broadcast_variables", lambda *given: None)
    for step, count in ((0, 1), (0, 1), (1, 2), (0, 3)):
        state.average(1000 * step)
        assert len(averaged) == count and averaged[-1] == [own]
    with state.own_put_back():
        state.average(5)
        assert float(own.numpy()) == 41.0
    assert float(own.numpy()) == 31.0
    state.average(0)
    assert len(averaged) == 4
    state.step.assign(7)
    state.broadcast()
    state.average(7)
    assert len(averaged) == 4


class Dropping(keras.layers.Layer):
    """A layer with a generator that others may have also."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def call(self, inputs: Any) -> Any:
        return inputs


def test_ranks_have_other_seeds_also_where_layers_share_a_generator() -> None:
    """The same ones for ever: a run that is resumed under a later version goes on."""
    found = []
    for rank in range(3):
        generator = keras.random.SeedGenerator(7)
        net = keras.Sequential([keras.Input((2,)), Dropping(generator), Dropping(generator)])
        generator.next()
        TrainState(net).draw_apart(rank)
        found.append(generator.state.numpy().tolist())
    assert found == [[7, 1], [2433363435, 1], [2539140569, 1]]


def test_names_in_a_checkpoint_and_first_values_are_fixed_for_ever() -> None:
    """A run that is resumed under a later version of this program finds them."""
    parts = {"model": 2, "random": 1, "optimizer": 4, "step": 1, "seconds": 1}
    names = {f"state/{part}/{number}" for part, count in parts.items() for number in range(count)}
    assert set(values_of(_state([([((2,), "float32")], "own")], 0))) == names | {"added/part0/0"}
    state = TrainState(keras.Sequential([keras.Input((2,))]))
    first = {name: (str(v.dtype), v.tolist()) for name, v in values_of(state).items()}
    assert first == {"state/step/0": ("int64", 0), "state/seconds/0": ("float64", 0.0)}


def test_ranks_get_the_state_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone has read the checkpoint."""
    sent: list[Any] = []
    monkeypatch.setattr("hvd_cifar.distributed.collectives.broadcast_variables", lambda *given: sent.append(given))
    (state := _state([], 0)).broadcast()
    assert [([v.path for v in variables], root) for variables, root in sent] == [([v.path for v in state.variables], 0)]
