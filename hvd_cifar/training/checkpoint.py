"""Saving and restoring the state of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed.collectives import random_states
from hvd_cifar.errors import DIVERGED, Diverged, UserError, reason_of
from hvd_cifar.files import read_json
from hvd_cifar.models import Net
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.training import checkpoint_files

KEPT = 5


class State:
    """The state of a run at a step: weights, optimizer slots, moving averages, random generators.

    Order and augmentation are pure functions of the seed and the step, so the step is also the position in the data.
    `origin` holds the other numbers that this position depends on: seed, global batch, examples of the training set.
    `optimizer` is None in a state for evaluation only.
    """

    def __init__(
        self,
        net: Net,
        optimizer: Any,
        averages: MovingAverage | None,
        origin: tuple[int, int, int] = (0, 0, 0),
        lookahead: Lookahead | None = None,
    ) -> None:
        self.net = net
        self.optimizer = optimizer
        self.averages = averages
        self.lookahead = lookahead
        self.step = keras.Variable(0, dtype="int64", trainable=False, name="step")
        self.origin = keras.Variable(np.asarray(origin), dtype="int64", trainable=False, name="origin")
        self.seconds = keras.Variable(0.0, dtype="float64", trainable=False, name="seconds")  # of training
        # Part of these, for comparisons of replicas.
        self.check_seconds = keras.Variable(0.0, dtype="float64", trainable=False, name="check_seconds")
        self.skipped = keras.Variable(0, dtype="int64", trainable=False, name="skipped")  # steps
        self.rollbacks = keras.Variable(0, dtype="int64", trainable=False, name="rollbacks")
        # Multiplies the schedule's learning rate, after rollbacks.
        self.rate_factor = keras.Variable(1.0, dtype="float64", trainable=False, name="rate_factor")

    @property
    def variables(self) -> list[Any]:
        """All variables, in the same order on every rank, for broadcast and comparison."""
        slots = self.optimizer.variables if self.optimizer else []
        averages = [v for kept in (self.averages, self.lookahead) if kept for v in kept.variables]
        counters = [self.step, self.origin, self.skipped, self.rollbacks, self.rate_factor, *self.clocks]
        return [*self.net.model.variables, *slots, *averages, *counters]

    @property
    def clocks(self) -> list[Any]:
        """The variables that hold times of a rank's own clock."""
        return [self.seconds, self.check_seconds]

    def replicated(self, local: Sequence[Any] = ()) -> list[Any]:
        """The variables that must be equal on all ranks: all except clocks, random generators and `local`."""
        own = set(map(id, [*self.clocks, *random_states(self.net.model), *local]))
        return [v for v in self.variables if id(v) not in own]

    @property
    def trackable(self) -> tf.train.Checkpoint:
        """The state as a TensorFlow checkpoint."""
        parts: dict[str, Any] = {"model": self.net.model, "step": self.step.value, "seconds": self.seconds.value}
        if self.optimizer:
            parts["optimizer"] = self.optimizer
            for name in ("origin", "skipped", "rollbacks", "rate_factor", "check_seconds"):
                parts[name] = getattr(self, name).value
            if states := random_states(self.net.model):  # Keras does not make them part of the model's checkpoint
                parts["random"] = tf.train.Checkpoint(variables=[v.value for v in states])
        if self.averages:
            parts["averages"] = tf.train.Checkpoint(variables=[v.value for v in self.averages.variables])
        if self.lookahead:
            parts["lookahead"] = tf.train.Checkpoint(variables=[v.value for v in self.lookahead.variables])
        if hidden := _hidden(self.net.model):
            parts["hidden"] = tf.train.Checkpoint(variables=[v.value for v in hidden])
        return tf.train.Checkpoint(**parts)


def _hidden(model: keras.Model) -> list[Any]:
    """The model's variables that TensorFlow's checkpoint of it lacks: in layers that a layer keeps in a list or dict.

    TensorFlow does not look into Keras's own kinds of list and dict. Random states have a place of their own.
    """
    known = {id(one) for one in tf.train.TrackableView(model).descendants()} | set(map(id, random_states(model)))
    return [v for v in model.variables if not {id(v), id(v.value)} & known]


class Checkpoints:
    """The newest checkpoints of a run directory. Only rank 0 has one."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state
        # Such as a mask of an attention layer: minus infinity is its value, not the mark of a diverged run.
        constants = [v for v in state.net.model.non_trainable_variables if not np.isfinite(v.numpy()).all()]
        self._infinite = set(map(id, constants))
        checkpoint_files.clear(folder)

    def save(self) -> Path:
        """Write the current state. Keep the newest 5 checkpoints up to this step.

        Later checkpoints are removed. They must be damaged, since a run resumes from its newest whole checkpoint.

        Raises:
            Diverged: where a value is not finite: a step with a finite loss may still spoil the weights.
            UserError: where it cannot be written. Earlier checkpoints are kept.
        """
        step = int(self.state.step.numpy())
        checked = [v for v in self.state.variables if id(v) not in self._infinite]
        spoilt = [v.path for v in checked if not np.isfinite(v.numpy()).all()]
        if spoilt:
            raise Diverged(
                f"{DIVERGED}: {spoilt[0]} is not finite after step {step}; it was not saved; "
                "lower --learning-rate or give --clip-norm"
            )
        try:
            path = checkpoint_files.write(self.state.trackable, self.folder, step)
        except (tf.errors.OpError, OSError) as failure:
            kept = "earlier checkpoints are kept" if checkpoint_files.listed(self.folder) else "nothing is saved"
            raise UserError(
                f"cannot write the checkpoint of step {step} in {self.folder}: {reason_of(failure)}; "
                f"{kept}; make room or give another --run-dir"
            ) from None
        self._remove_all_but(path, KEPT)
        return path

    def go_back(self, useless_step: int | None) -> Path | None:
        """Restore the newest whole checkpoint, and remove later ones; None where there is none.

        The checkpoint of `useless_step`, whose weights gave a loss that is not finite, is the last choice.
        """
        whole = [path for path in checkpoint_files.listed(self.folder) if checkpoint_files.damage(path) is None]
        path = next((path for path in whole if path.name != f"step-{useless_step}"), whole[0] if whole else None)
        if path is not None:
            self.restore(path)
            self._remove_all_but(path, KEPT)
        return path

    def _remove_all_but(self, path: Path, kept: int) -> None:
        """Remove later checkpoints than `path`, and keep `kept` in all."""
        newest_first = checkpoint_files.listed(self.folder)
        own = newest_first.index(path)
        for other in (*newest_first[:own], *newest_first[own + kept :]):
            checkpoint_files.remove(other)

    def restore(self, path: Path) -> None:
        """Read a state.

        Raises:
            UserError: where the checkpoint is of another model, or of another order of the data.
        """
        expected = self.state.origin.numpy().tolist()
        restore(self.state.trackable, path)
        found = self.state.origin.numpy().tolist()
        if found != expected:
            names = ("seed", "global batch", "training examples")
            changed = [f"{n} was {a}, is {b}" for n, a, b in zip(names, found, expected, strict=True) if a != b]
            raise UserError(
                f"the checkpoint {path} is of another run ({'; '.join(changed)}): give the same settings, or another "
                "--resume"
            )


def restore(trackable: tf.train.Checkpoint, path: Path, partial: bool = False) -> None:
    """Read a checkpoint that `checkpoint_files.find` has checked. `partial`: it may hold more than these objects.

    Raises:
        UserError: where it lacks what the objects need.
    """
    try:
        status = trackable.read(checkpoint_files.prefix(path))
        status.assert_existing_objects_matched()
        if not partial:
            status.assert_consumed()
        else:
            status.expect_partial()
    # TensorFlow raises some of the reader's errors as Python's built-in ones: for a truncated file an IndexError.
    except (tf.errors.OpError, AssertionError, ValueError, LookupError, OSError, RuntimeError) as failure:
        tf.get_logger().setLevel("ERROR")  # else it lists at exit, one line each, the variables that were not restored
        raise UserError(
            f"cannot read the checkpoint {path}: {reason_of(failure)}; "
            "give another one, or the settings it was made with"
        ) from None


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


def differences(path: Path, now: dict[str, Any]) -> list[str]:
    """What differs between a run directory's config.json and `now`, in words.

    Raises:
        UserError: where the file is damaged.
    """
    defaults = {name: field.default for name, field in TrainSettings.model_fields.items()}
    then = {**defaults, **recorded(path)}  # the record of an older run lacks newer settings; it had their defaults
    changed = [name for name in now if name in then and then[name] != now[name]]
    return [f"{name.replace('_', ' ')} was {then[name]}, is {now[name]}" for name in changed]
