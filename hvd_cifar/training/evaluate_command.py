"""The `evaluate` command: a checkpoint of a run, on the whole test set, at any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_cifar import config
from hvd_cifar.config import EvaluateSettings, TrainSettings
from hvd_cifar.data.dataset import Examples
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.files import replace_text
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training import checkpoint, checkpoint_files
from hvd_cifar.training.assemble import make_net, prepare
from hvd_cifar.training.evaluate import Evaluation, make_evaluator
from hvd_cifar.training.trainer import OfUser


class RestoredNet:
    """A run's net, for evaluations of its checkpoints."""

    def __init__(self, trained: TrainSettings, world: World, given: OfUser | None = None) -> None:
        """`trained`: of `settings_of`. A collective."""
        self.work = prepare(trained, world, given)
        self.world = world
        net = collectives.on_every_rank(lambda: make_net(self.work))
        decay = self.work.settings.ema_decay
        self._averages = MovingAverage(net.model.trainable_variables, decay) if decay else None
        self.state = checkpoint.State(net, None, self._averages)

    def read(self, path: Path) -> None:
        """Take the weights of a checkpoint, averaged where the run keeps averages. A collective.

        Raises:
            UserError: where it cannot be read, or is of another net.
        """
        collectives.on_root(lambda: checkpoint.restore(self.state.trackable, path, partial=True))
        collectives.broadcast_variables(self.state.variables)
        if self._averages:
            self._averages.swap()

    def evaluator(self, examples: Examples, batch_size: int, count: int | None) -> Callable[[bool], Evaluation]:
        """As `make_evaluator` makes it."""
        return make_evaluator(self.state.net.model, examples, self.work.transforms, self.world, batch_size, count)


def evaluate_run(settings: EvaluateSettings, given: OfUser | None = None) -> dict[str, Any]:
    """Evaluate a run's checkpoint on all ranks of this job; rank 0 prints and writes --output.

    Raises:
        UserError: where there is no such run or checkpoint, or its data set is not to be had.
        TrainingError: where the loss is not finite.
    """
    with session() as world:
        has_data = given is not None and given.dataset is not None
        trained, path = collectives.on_root(lambda: _find(settings, has_data))
        net = RestoredNet(trained, world, given)
        net.read(path)
        work, state = net.work, net.state

        many = bool(work.settings.test_time_augmentation)
        found = net.evaluator(work.dataset.test, settings.batch_size, settings.eval_examples)(many)
        if not math.isfinite(found.loss):
            raise TrainingError(f"test loss = {found.loss}: the run had diverged at {path}; give another --checkpoint")
        result: dict[str, Any] = {
            "dataset": work.dataset.name,
            "model": trained.model,
            "checkpoint": str(path),
            "step": int(state.step.numpy()),
            "world_size": world.size,
            "test_accuracy": found.accuracy,
            "test_loss": found.loss,
            "test_views": found.views,
            "test_accuracy_of_one_view": found.plain_accuracy,
            "test_examples": found.examples,
        }
        if world.is_root:
            terminal.say(
                f"{work.dataset.name}, {trained.model}, step {result['step']}: test accuracy {found.accuracy:.2%}, "
                f"test loss {found.loss:.4f}, {found.examples} examples, {world.size} rank{'s' * (world.size > 1)}"
            )
        collectives.on_root(lambda: _write(settings.output, result))
        return result


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The settings of a run, by name, for an evaluation. Raises UserError where there is no run."""
    recorded = run_dir / "config.json"
    if not recorded.exists():
        raise UserError(f"--run-dir {run_dir}: there is no run (no config.json); give the folder of a run")
    values = config.read_file(recorded)
    # An evaluation makes no steps: the number of ranks need not fit the run's global batch.
    values |= {"virtual_shards": None, "gradient_accumulation": 1, "global_batch_size": None, "batch_size": 1}
    return values | {"image_sizes": [], "callbacks": []}


def _find(settings: EvaluateSettings, has_data: bool) -> tuple[TrainSettings, Path]:
    """The run's settings, with those of the evaluation instead where they are given, and the checkpoint."""
    values = settings_of(settings.run_dir) | {"hold_out": None}  # the test set is for evaluation
    instead = ("model", "dataset", "data_dir", "test_time_augmentation")
    values.update({name: v for name in instead if (v := getattr(settings, name)) is not None})
    if has_data:
        values["dataset"] = "auto"
    path = checkpoint_files.find(settings.checkpoint or settings.run_dir)
    if path is None:
        raise UserError(f"{settings.checkpoint or settings.run_dir}: there is no checkpoint; give --checkpoint PATH")
    return config.make(TrainSettings, values), path


def _write(output: Path | None, result: dict[str, Any]) -> None:
    if output is None:
        return
    try:
        replace_text(output, json.dumps(result, indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"--output {output}: {failure.strerror}; give a file that can be written") from None
