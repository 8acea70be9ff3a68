"""The `evaluate` command: evaluates a checkpoint of a run on the whole test set, on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_cifar.config import EvaluateSettings, TrainSettings
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.files import replace_text
from hvd_cifar.models.portable import finish_all
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training import checkpoint, user_code, user_files
from hvd_cifar.training.confusion import FILE, MOST_CLASSES
from hvd_cifar.training.evaluate import Evaluation, make_evaluator
from hvd_cifar.training.run_dir import described, recorded
from hvd_cifar.training.trained import find, state_of
from hvd_cifar.training.work import UserObjects, make_net, prepare


class RestoredNet:
    """A run's net, for evaluations of its checkpoints."""

    def __init__(
        self, trained: TrainSettings, world: World, given: UserObjects | None = None, learnt: Dataset | None = None
    ) -> None:
        """`trained`: from `trained.settings_of`; `learnt`: the run's data set, where another one is evaluated.

        A collective.
        """
        # Evaluation makes no steps, so the run's global batch need not fit the ranks and the training set.
        one = trained.model_copy(update={"global_batch_size": None, "batch_size": 1})
        self.work = prepare(one, world, given, trained.global_batch_size or 0, learnt)
        self.world = world
        self.net = collectives.on_every_rank(lambda: make_net(self.work))
        self.state, self.averages = state_of(self.net, self.work.recipe)

    def read(self, path: Path) -> None:
        """Load the weights of a checkpoint, or their moving averages where the run keeps them. A collective.

        Raises:
            UserError: where it cannot be read, or is of another net.
        """
        collectives.on_root(lambda: checkpoint.restore(self.state, path, partial=True))
        self.state.broadcast()
        finish_all(self.net.model)
        if self.averages:
            self.averages.swap()

    def evaluator(self, part: str, batch_size: int | None = None) -> Callable[[bool], Evaluation]:
        """An evaluator of this net; see `make_evaluator`."""
        work = self.work
        return make_evaluator(self.net.model, work.dataset, work.transforms, self.world, batch_size, part)


def _learnt(run_dir: Path) -> Dataset | None:
    """The data set of a run, without examples; None where an older run has not recorded it."""
    facts = recorded(run_dir / "config.json")["run"]
    return described(facts, run_dir) if "data" in facts else None


def _tell_of_other_examples(run_dir: Path, dataset: Dataset) -> None:
    """A note where the run's test set is not as in the run. On rank 0."""
    then = recorded(run_dir / "config.json")["run"].get("test_sha256")
    if then is not None and then != dataset.test.digest:
        terminal.complain(f"hvd_cifar: note: {dataset.name}: its test examples are not those of the run")


def evaluate_run(settings: EvaluateSettings, given: UserObjects | None = None) -> dict[str, Any]:
    """Evaluate a run's checkpoint on all ranks of this job; rank 0 prints and writes --output, and confusion.json.

    Raises:
        UserError: where there is no such run or checkpoint, or its data set cannot be found or made.
        TrainingError: where the loss is not finite.
    """
    with session() as world:
        has_data = given is not None and given.dataset is not None
        trained, path = collectives.on_root(lambda: find(settings, needs_data=not has_data))
        own = [spec for spec in (settings.model, settings.dataset) if spec is not None]
        user_code.use_copies(collectives.on_root(lambda: user_files.copies_of(settings.run_dir, own)))
        net = RestoredNet(trained, world, given, collectives.on_root(lambda: _learnt(settings.run_dir)))
        net.read(path)
        work, state = net.work, net.state
        if not has_data and settings.dataset is None:
            collectives.on_root(lambda: _tell_of_other_examples(settings.run_dir, work.dataset))

        many = work.recipe.test_time_augmentation
        found = net.evaluator("test", settings.batch_size)(many)
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
        collectives.on_root(lambda: _write(settings, result, work.dataset, found))
        return result


def _write(settings: EvaluateSettings, result: dict[str, Any], dataset: Dataset, found: Evaluation) -> None:
    """Rank 0's files. Raises UserError where one cannot be written."""
    output = settings.output
    if output is not None:
        with _writing(f"--output {output}", "a file"):
            replace_text(output, json.dumps(result, indent=2) + "\n")
    if not settings.confusion:
        return
    if found.confusion is None:
        raise UserError(f"--confusion: a matrix of {dataset.classes} classes is too large; {MOST_CLASSES} are the most")
    folder = output.parent if output else settings.run_dir
    with _writing(f"--confusion: {folder / FILE}", "--output in a folder"):
        terminal.say(f"confusion matrix and worst mistakes: {found.confusion.write(folder, dataset, result['step'])}")


@contextmanager
def _writing(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise UserError(f"{what}: {failure.strerror}; give {remedy} that can be written") from None
