"""`train` and `evaluate` for Python programs. Unlike the commands, they also take objects instead of names.

Start such a program on N ranks like any Horovod program: `./run.sh -np 2 python PROGRAM.py`, mpirun or horovodrun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_cifar import config
from hvd_cifar.config import EvaluateSettings, TrainSettings
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.training import train as training
from hvd_cifar.training import trained, user_code
from hvd_cifar.training.callbacks import Callback
from hvd_cifar.training.work import UserObjects


def train(
    model: str | Callable[..., Any] = "fast",
    dataset: str | Dataset | Callable[[], Dataset] = "auto",
    *,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Train on all ranks of this job; rank 0 prints, and writes the run directory. A collective.

    The run sets Keras's dtype policy, float type, order of dimensions and random seed, and does not restore them at its
    end.

    Args:
        model: a name of `fields.MODELS`, FILE.py:NAME, package.module:NAME, or the function itself:
            build(image_shape, classes) -> keras.Model, from float images [b, height, width, channels] to logits
            [b, classes], alone or as (model, `Recipe`).
        dataset: a name that --dataset takes, a `Dataset`, or a function that returns one.
        callbacks: objects whose methods are called at events of the run, on every rank.
        **settings: every option of `train` by its name, such as epochs=5 or global_batch_size=256.

    Returns:
        The summary of the run, as in summary.json; the same on every rank.

    Raises:
        UserError: where a setting does not fit the machine, the data or the run directory.
        TrainingError: where the loss is not finite, gradients are not averaged, or ranks are out of sync.
    """
    user_code.leave_while_loading()
    given, named = _of_user(model, dataset, callbacks)
    return training.train(config.make(TrainSettings, {**named, **settings}), given)


def evaluate(
    run_dir: str | Path,
    model: str | Callable[..., Any] | None = None,
    dataset: str | Dataset | Callable[[], Dataset] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a run's checkpoint on the whole test set, on all ranks of this job. A collective.

    Args:
        run_dir: folder of the run.
        model: as for `train`; needed where the run was trained with a function that has no name, such as a lambda.
            [default: the run's]
        dataset: as for `train`. [default: the run's]
        **settings: every option of `evaluate` by its name.

    Returns:
        What --output writes: accuracy and loss, with data set, net, checkpoint and step; the same on every rank.

    Raises:
        UserError: where there is no such run or checkpoint, or its data set cannot be found or made.
    """
    user_code.leave_while_loading()
    given, named = _of_user(model, dataset, ())
    if not isinstance(model, str):
        named.pop("model", None)  # the run's record names it
    made = config.make(EvaluateSettings, {"run_dir": run_dir, **named, **settings})
    return trained.evaluate_run(made, given)


def _of_user(model: Any, dataset: Any, callbacks: Sequence[Callback]) -> tuple[UserObjects, dict[str, str]]:
    """The objects that the user passed, and settings that name them in the run's record."""
    given = {"model": model, "dataset": dataset}
    named = {
        name: one if isinstance(one, str) else user_code.spec_of(one)
        for name, one in given.items()
        if one is not None and not isinstance(one, Dataset)
    }
    own = {name: one for name, one in given.items() if not isinstance(one, str)}
    return UserObjects(**own, callbacks=tuple(callbacks)), named
