"""`TrainState`: all variables of a run. Checkpoint, elastic copy and comparison use this list."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np

from hvd_cifar.data import sampler
from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.collectives import random_states
from hvd_cifar.distributed.reduction import average_variables

Kind = Literal["shared", "own", "root"]


class Part(NamedTuple):
    """Variables that a name stands for, in a fixed order."""

    variables: Sequence[Any]
    kind: Kind
    is_core: bool


class TrainState:
    """The state of a run at a step, as named parts.

    Order and augmentation are pure functions of the seed and the step, so the step is also the position in the data.

    Attributes:
        model: its variables are the part "model".
        optimizer: None in a state for evaluation.
        step: finished global steps, when the state was last saved or copied.
        seconds: of training until then.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self._parts: dict[str, Part] = {}
        self._own: list[Any] = []
        self._averaged_step: int | None = None
        seeds = random_states(model)
        left_out = set(map(id, seeds))
        self.add("model", [v for v in model.variables if id(v) not in left_out], core=True)
        self.add("random", seeds, "root", core=True)
        self.add("optimizer", optimizer.variables if optimizer else [], core=True)
        self.step = self.number("step", 0, core=True)
        self.seconds = self.number("seconds", 0.0, "root", core=True)

    def add(self, name: str, variables: Sequence[Any], kind: Kind = "shared", core: bool = False) -> None:
        """Make variables a part of the state, so that they are saved, restored, copied and compared.

        Args:
            name: of the part, one for each caller.
            variables: Keras's, the same on every rank in number, type and shape.
            kind: "shared": the same on all ranks. "own": differs between ranks, which average it before it is saved or
                evaluated. "root": each rank has its own, such as a clock; rank 0's is saved, and it is never compared.
            core: whether a checkpoint that lacks them cannot be read.

        Raises:
            ValueError: where the name is taken.
        """
        if name in self._parts:
            raise ValueError(f"the state has a part {name} already: give the variables another name")
        self._parts[name] = Part(variables, kind, core)

    def number(self, name: str, value: float, kind: Kind = "shared", core: bool = False) -> keras.Variable:
        """A new part of one number: int64 for an int, float64 for a float."""
        dtype = "int64" if isinstance(value, int) else "float64"
        variable = keras.Variable(value, dtype=dtype, trainable=False, name=name)
        self.add(name, [variable], kind, core)
        return variable

    def part(self, name: str) -> Sequence[Any]:
        """The variables of a part; empty where there is none."""
        return self._parts[name].variables if name in self._parts else ()

    def declare_own(self, variables: Sequence[Any]) -> None:
        """Declare variables of the part "model" that differ between ranks, such as local moving statistics."""
        self._own += variables

    @property
    def variables(self) -> list[Any]:
        """All variables, in the same order on every rank."""
        return [v for part in self._parts.values() for v in part.variables]

    @property
    def own(self) -> list[Any]:
        """The variables that differ between ranks."""
        return [*self._own, *(v for part in self._parts.values() if part.kind == "own" for v in part.variables)]

    def replicated(self, with_own: bool) -> list[Any]:
        """The variables that must be equal on all ranks; `with_own`: after `average`, those of `own` also."""
        left_out = set() if with_own else set(map(id, self.own))
        shared = (v for part in self._parts.values() if part.kind != "root" for v in part.variables)
        return [v for v in shared if id(v) not in left_out]

    def broadcast(self, root: int = 0) -> None:
        """Give all ranks the values of one rank, bit for bit. A collective. Then call `draw_apart`, once."""
        collectives.broadcast_variables(self.variables, root)
        self._averaged_step = int(self.step.numpy())  # `own` is the same on all ranks

    def draw_apart(self, rank: int) -> None:
        """Derive this rank's seeds of random layers, such as dropout, from those that all ranks have got from rank 0.

        So ranks do not drop the same units. Rank 0 keeps its seeds, which checkpoints hold.
        """
        for state in random_states(self.model):
            seed, count = state.numpy().tolist()
            state.assign([seed ^ (int(sampler.mix(np.uint64(rank))) >> 32) if rank else seed, count])

    def average(self, step: int) -> None:
        """Average `own` over the ranks, at most once a step, since each average rounds. A collective."""
        if self._averaged_step != step:
            average_variables(self.own)
            self._averaged_step = step

    @contextlib.contextmanager
    def own_put_back(self) -> Iterator[None]:
        """A block after which the variables of `own` have this rank's values again."""
        before, averaged = [v.numpy() for v in self.own], self._averaged_step
        yield  # an error ends the run
        for variable, value in zip(self.own, before, strict=True):
            variable.assign(value)
        self._averaged_step = averaged

    def named(self) -> dict[str, Any]:
        """The variables by their names in a checkpoint: state/PART/N, or added/PART/N where a callback adds them."""
        return {
            f"{'state' if part.is_core else 'added'}/{name}/{number}": variable
            for name, part in self._parts.items()
            for number, variable in enumerate(part.variables)
        }
