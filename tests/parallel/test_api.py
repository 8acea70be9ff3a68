"""A user's own net, data set and callback, from Python and from the command line, on real ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import command, error_of, run_ranks

EXAMPLES = 42  # in batches of 8: the last of an epoch has 2 examples, fewer than 3 ranks


def _data() -> Any:
    """Grey images, wider than high, of three classes: a class is the third that is bright."""
    import numpy as np

    import hvd_cifar

    generator = np.random.default_rng(7)

    def part(count: int) -> tuple[Any, Any]:
        labels = generator.integers(0, 3, count)
        images = generator.integers(0, 60, (count, 10, 12), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 4 * label : 4 * label + 4] += 120
        return images, labels

    return hvd_cifar.Dataset.from_arrays(*part(EXAMPLES), *part(21))


def _net(image_shape: tuple[int, int, int], classes: int) -> Any:
    """Keras's own layers, batch norm among them."""
    import keras
    from keras import layers

    images = x = keras.Input(image_shape)
    x = layers.Conv2D(4, 3, padding="same", kernel_regularizer=keras.regularizers.L2(1e-3))(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return keras.Model(images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def _train(run_dir: str, steps: int, callbacks: Any = (), **more: Any) -> dict[str, Any]:
    import hvd_cifar

    common = {"global_batch_size": 8, "epochs": 10, "precision": "float64", "sync_batch_norm": True, "log_every": 1}
    common |= {"eval_every": 0, "set": {"warmup_epochs": 0}, "run_dir": run_dir, "max_steps": steps}
    return hvd_cifar.train(_net, _data(), callbacks=callbacks, **{**common, **more})


def _twice_in_one_process(folder: str) -> dict[str, Any]:
    """A run, the same run resumed, and another one beside them; what a callback saw of the first two."""
    import hvd_cifar

    seen: list[list[Any]] = []

    class Recorder(hvd_cifar.Callback):
        def on_start(self, run: Any) -> None:
            seen.append(["start", run.step, run.world.rank, run.total_steps])

        def on_step(self, run: Any) -> None:
            seen.append(["step", run.step, run.progress.examples])

        def on_log(self, run: Any) -> None:
            seen.append(["log", run.step, run.loss is not None and run.learning_rate > 0])

        def on_evaluation(self, run: Any, evaluation: Any) -> None:
            seen.append(["evaluation", run.step, evaluation.examples])

        def before_checkpoint(self, run: Any) -> None:
            seen.append(["before checkpoint", run.step])

        def on_checkpoint(self, run: Any, path: Path) -> None:
            seen.append(["checkpoint", run.step, path.name])

        def on_end(self, run: Any) -> None:
            seen.append(["end", run.step, run.summary["steps"], run.evaluation.examples])

    often = {"log_every": 2, "eval_every": 3, "checkpoint_every": 4}
    first = _train(f"{folder}/a", 4, [Recorder()], **often)
    refused = [error_of(lambda: _train(f"{folder}/a", 6, seed=1))]  # and leaves the folder to the next
    resumed = _train(f"{folder}/a", 6, [Recorder()], **often)
    whole = _train(f"{folder}/b", 6, **often)
    data = _data()
    again = hvd_cifar.evaluate(f"{folder}/b", _net, data)
    test = (data.test.images, data.test.labels)
    dark = (data.train.images[:1] // 2, data.train.labels[:1])  # fewer examples than ranks
    moved = hvd_cifar.Dataset.from_arrays(*dark, *test)
    of_other_statistics = hvd_cifar.evaluate(f"{folder}/b", _net, moved)
    narrow = (data.test.images[:, :, :9], data.test.labels)
    alike = (data.test.images, data.test.labels * 0)
    refused += map(
        error_of,
        (
            lambda: hvd_cifar.evaluate(f"{folder}/b", _net),
            lambda: hvd_cifar.evaluate(f"{folder}/b", _net, hvd_cifar.Dataset.from_arrays(*narrow, *narrow)),
            lambda: hvd_cifar.train(_net, hvd_cifar.Dataset.from_arrays(*alike, *alike), run_dir=f"{folder}/alike"),
        ),
    )
    asked = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    evaluated = [again, of_other_statistics]
    runs = [first, resumed, whole]
    return {"seen": seen, "summaries": runs, "evaluated": evaluated, "refused": refused, "asked": asked}


def test_train_and_evaluate_twice_in_one_process_with_a_callback(tmp_path: Path) -> None:
    one, other = run_ranks(_twice_in_one_process, 2, str(tmp_path), timeout=300)
    assert one["summaries"] == other["summaries"]
    first, resumed, whole = one["summaries"]
    assert (first["steps"], resumed["steps"], whole["steps"]) == (4, 6, 6)
    assert resumed["weights_sha256"] == whole["weights_sha256"] != first["weights_sha256"]
    other_seed, unnamed, narrow, alike = one["refused"]
    assert "seed was 0, is 1" in other_seed
    assert "data set was a Python object" in unnamed  # whatever its name is
    assert "data set arrays: its images are 10 x 9 x 1 and the run's 10 x 12 x 1" in narrow
    assert "data set arrays: all labels are 0: give examples of two or more classes" in alike
    assert one["asked"]  # SIGUSR1 does what it did before
    for name in ("test_accuracy", "test_loss", "test_examples"):
        # Images are standardised as in training, whatever the training part of the set that is evaluated.
        assert [found[name] for found in one["evaluated"]] == pytest.approx([whole[name]] * 2, rel=1e-9)

    def events(seen: list[list[Any]]) -> list[list[Any]]:
        return [event[:1] + event[1:2] for event in seen]

    assert events(one["seen"]) == events(other["seen"])
    assert events(one["seen"]) == [
        ["start", 0], ["step", 1], ["log", 2], ["step", 2], ["evaluation", 3], ["step", 3],
        ["log", 4], ["step", 4], ["evaluation", 4], ["before checkpoint", 4], ["checkpoint", 4], ["end", 4],
        ["start", 4], ["step", 5], ["log", 6], ["step", 6],
        ["evaluation", 6], ["before checkpoint", 6], ["checkpoint", 6], ["end", 6],
    ]  # fmt: skip
    used = [
        sorted(mine[2] + theirs[2])
        for mine, theirs in zip(one["seen"], other["seen"], strict=True)
        if mine[0] == "step"
    ]
    assert sorted(sum(used, [])) == list(range(EXAMPLES))  # every example once in the six steps of the first epoch


MINE = """
import keras, numpy as np
from hvd_cifar import Callback, Dataset, Recipe

def build(image_shape, classes):
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

def adam(image_shape, classes):
    return build(image_shape, classes), Recipe(optimizer=keras.optimizers.Adam, learning_rate=1e-3, epochs=2)

def load():
    images = np.zeros((60, 8, 8, 3), np.uint8)
    labels = np.arange(60) % 4
    images[np.arange(60), labels] = 200
    return Dataset.from_arrays(images, labels, images[:20], labels[:20])

class Shout(Callback):
    def on_end(self, run):
        if run.world.rank == 0:
            with open("shouts", "x") as file:
                file.write(f"{run.step} {run.settings.learning_rate}")

def three_logits(image_shape, classes):
    return build(image_shape, 3)

def augments(image_shape, classes):
    return build(image_shape, classes), Recipe(augmentation=lambda image: image)

class NeedsPath(Callback):
    def __init__(self, path):
        self.path = path
"""


def _in(folder: str, *lines: list[Any]) -> list[Any]:
    """What commands return in a folder."""
    os.chdir(folder)
    return [command(line) for line in lines]


def test_own_files_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "nets.py").write_text(MINE)
    (tmp_path / "elsewhere").mkdir()
    words: list[Any] = ["train", "--dataset", "mine.py:load", "--run-dir", tmp_path / "run", "--batch-size", 5]
    words += ["--model", "package.nets:adam", "--callbacks", "mine.py:Shout"]
    ranks = run_ranks(_in, 2, str(tmp_path), words)
    assert [rank[0]["code"] for rank in ranks] == [0, 0], ranks
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"] == "package.nets:adam" and config["dataset"] == f"{tmp_path}/mine.py:load"
    assert (tmp_path / "shouts").read_text() == "12 0.001"  # 2 epochs of 6 steps of 10; by rank 0 alone
    # Evaluated from elsewhere, and without the files, by what the run has recorded.
    (tmp_path / "package").rename(tmp_path / "away")
    evaluate = ["evaluate", "--run-dir", tmp_path / "run"]
    ((done,),) = run_ranks(_in, 1, str(tmp_path / "elsewhere"), evaluate)
    assert done["code"] == 0 and "20 examples, 1 rank" in done["said"][-1], done


# An option, and what is said of it.
WRONG = [
    (("--model", "nowhere.py:build"), "nowhere.py:build: No such file or directory"),
    (("--model", "mine.py:absent"), "there is no absent in"),
    (("--model", "mine.py:three_logits"), "makes (None, 3) from images (None, 8, 8, 3); make (None, 4)"),
    (("--model", "mine.py:augments"), "augmentation of its recipe is a function; give a name or Transforms"),
    (("--dataset", "mine.py:build"), "--dataset"),
    (("--callbacks", "mine.py:load"), "--callbacks"),
    (("--callbacks", "mine.py:NeedsPath"), "called without arguments: TypeError: NeedsPath.__init__() missing"),
]


def test_what_is_wrong_with_own_code_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    own = {"--model": "mine.py:build", "--dataset": "mine.py:load", "--batch-size": "5", "--run-dir": "run"}
    lines = [["train", *sum(map(list, (own | dict([option])).items()), [])] for option, _ in WRONG]
    (by_case,) = run_ranks(_in, 1, str(tmp_path), *lines)
    for found, (option, message) in zip(by_case, WRONG, strict=True):
        (line,) = found["errors"]
        assert found["code"] == 2 and message in line, (option, found)
