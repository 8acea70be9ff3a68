"""A user's layers that compute over all ranks or draw random numbers, and a user's code that fails on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import error_of, run_all
from tests.small import net_with, train_on_grey

Results = dict[int, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the functions below returned, by the job's number of ranks, their names and rank: each job starts once."""
    folder = tmp_path_factory.mktemp("runs")
    for rank in range(3):  # the user's file is in rank 0's folder, and another of its name in rank 2's
        (folder / f"rank-{rank}").mkdir()
        (folder / f"rank-{rank}" / "beside_mine.py").write_text("NAME = 'ours'\n")  # what the file imports is there
    text = "import beside_mine\ndef build():\n    return beside_mine.NAME\ndef broken():\n    1 / 0\n"
    (folder / "rank-0" / "mine.py").write_text(text)
    (folder / "rank-2" / "mine.py").write_text("def build():\n    return 'another file of this name'\n")
    functions: dict[int, dict[str, Callable[..., Any]]] = {
        1: {"losses": _losses_of_synchronised_layers},
        2: {
            "drop": _drop,
            "state": _with_state,
            "prepared": _prepared_by_the_user,
            "fails": _code_that_fails_on_rank_1,
        },
        3: {"losses": _losses_of_synchronised_layers, "loads": _load_where_the_file_is_not},  # and stays there
    }

    def start(n: int) -> dict[str, list[Any]]:
        places = {name: str(folder / f"{name}-{n}" if name != "loads" else folder) for name in functions[n]}
        return run_all({name: partial(call, places[name]) for name, call in functions[n].items()}, n, timeout=300)

    return {n: start(n) for n in functions}


def _losses_of_synchronised_layers(folder: str) -> list[float]:
    import keras

    import hvd_cifar

    losses: list[float] = []

    class Losses(hvd_cifar.Callback):
        def on_log(self, run: hvd_cifar.Run) -> None:
            losses.append(run.loss or 0.0)

    class Squares(keras.layers.Layer):
        def call(self, images: Any) -> Any:
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(images), axis=(1, 2, 3)))  # of each example
            self.add_loss(keras.ops.full((5,), 0.1, dtype=images.dtype))  # as a regularizer's
            return images

    train_on_grey(folder, net_with(hvd_cifar.SyncBatchNormalization, Squares), [Losses()], max_steps=12)
    return losses


def test_a_net_s_own_synchronised_layers_are_not_put_back_on_a_rank_without_an_example(jobs: Results) -> None:
    """Without --sync-batch-norm: the layer itself says what it is. Another one adds two losses of its own."""
    (alone,) = jobs[1]["losses"]
    assert len(set(alone)) == 12
    for losses in jobs[3]["losses"]:
        assert losses == pytest.approx(alone, rel=1e-12)


def _with_state(folder: str) -> list[str]:
    """Nets whose own layer counts what its rank sees, under a name that no one knows and under one that is averaged."""
    import keras

    class Counts(keras.layers.Layer):
        def __init__(self, called: str, dtype: str) -> None:
            super().__init__(dtype=dtype)
            self.called = called

        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name=self.called)

        def call(self, images: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.mean(images), self.seen.dtype))
            self.add_loss(1e-4 * keras.ops.square(keras.ops.reshape(images, (-1,))))  # of no example
            return images

    nets = {
        "unknown": net_with(partial(Counts, "seen", "float64")),
        "known": net_with(keras.layers.BatchNormalization, partial(Counts, "moving_mean", "float64")),  # of two types
    }
    how = {"precision": "float32", "max_steps": 2}
    return [error_of(train_on_grey, f"{folder}/{name}", net, **how) for name, net in nets.items()]


def test_a_layer_s_own_state_is_averaged_under_a_known_name_and_else_reported_at_once(jobs: Results) -> None:
    for other, known in jobs[2]["state"]:
        assert "ranks are out of sync after step 1: counts/seen is not the same on rank 0 as on rank 1" in other
        assert "if its layer changes it by a rank's own examples, name it moving_mean" in other
        assert known == "accepted"


def _prepared_by_the_user(folder: str) -> list[tuple[float, float]]:
    """A layer's weight and the constant that it computes with, after a run and a resumed one. Each rank adapts anew."""
    import keras
    import numpy as np

    import hvd_cifar

    found: list[tuple[float, float]] = []

    class Looks(hvd_cifar.Callback):
        def on_end(self, run: hvd_cifar.Run) -> None:
            (layer,) = (layer for layer in run.model.layers if isinstance(layer, keras.layers.Normalization))
            found.append((np.asarray(layer.adapt_mean).item(), np.asarray(layer.mean).item()))

    def adapted() -> Any:
        layer = keras.layers.Normalization(axis=None)
        layer.adapt(np.random.default_rng().normal(size=8))
        return layer

    for steps in (1, 2):
        assert train_on_grey(folder, net_with(adapted), [Looks()], max_steps=steps)["replicas_identical"]
    return found


def test_a_layer_that_the_user_prepares_computes_with_rank_0_s_and_the_checkpoint_s_values(jobs: Results) -> None:
    ranks = jobs[2]["prepared"]
    assert ranks[0] == ranks[1] and len({value for pair in ranks[0] for value in pair}) == 1


def _drop(folder: str) -> dict[str, Any]:
    """A run in one go, and one that is resumed; and the seeds of this rank after each."""
    import keras

    import hvd_cifar
    from hvd_cifar.distributed.collectives import random_states

    seeds: list[list[int]] = []

    class Seeds(hvd_cifar.Callback):
        def on_end(self, run: hvd_cifar.Run) -> None:
            (state,) = random_states(run.model)
            seeds.append(state.numpy().tolist())

    net = net_with(partial(keras.layers.Dropout, 0.5))
    runs = (("whole", 6), ("cut", 4), ("cut", 6))
    ends = [train_on_grey(f"{folder}/{name}", net, [Seeds()], max_steps=n, check_sync_every=1) for name, n in runs]
    return {"whole": ends[0], "resumed": ends[2], "seeds": seeds}


def test_ranks_drop_other_units_and_a_resumed_run_goes_on_with_the_same(jobs: Results) -> None:
    ranks = jobs[2]["drop"]
    for rank in ranks:
        assert rank["whole"]["replicas_identical"] and rank["resumed"]["replicas_identical"]
        assert rank["whole"]["weights_sha256"] == rank["resumed"]["weights_sha256"]
        whole, cut, resumed = rank["seeds"]
        assert whole == resumed and whole[1] == cut[1] + 2 == 6  # one mask in each step
    assert ranks[0]["seeds"][0][0] != ranks[1]["seeds"][0][0]


def _code_that_fails_on_rank_1(folder: str) -> dict[str, str]:
    import horovod.tensorflow as hvd

    import hvd_cifar

    def fail(message: str) -> None:
        if hvd.rank() == 1:
            raise KeyError(message)

    built: list[int] = []

    def once(image_shape: tuple[int, int, int], classes: int) -> Any:
        built.append(1)
        if len(built) > 1:  # after the recipe was asked for
            fail("build")
        return net_with()(image_shape, classes)

    def schedule(done: float) -> float:
        fail("schedule")
        return 1.0 - done

    nets = {"build": once, "schedule": net_with(recipe=hvd_cifar.Recipe(schedule=schedule))}
    return {name: error_of(train_on_grey, f"{folder}/{name}", net, max_steps=1) for name, net in nets.items()}


def test_a_user_s_code_that_fails_on_one_rank_ends_all_with_the_cause(jobs: Results) -> None:
    first, second = jobs[2]["fails"]
    assert first["build"] == second["build"] and first["build"].startswith("UserError: ")
    assert "KeyError: 'build' (test_own_layers.py, line " in first["build"]
    assert first["schedule"] == "TrainingError: rank 1 failed with KeyError: 'schedule'"
    assert second["schedule"] == "KeyError: 'schedule'"  # with its traceback


def _load_where_the_file_is_not(folder: str) -> list[str]:
    """The user's file by a relative path, which only rank 0 finds."""
    import linecache
    import os

    from hvd_cifar.runtime.world import start
    from hvd_cifar.training import user_code

    os.chdir(Path(folder, f"rank-{start().rank}"))
    build = user_code.load("mine.py:build", "--model")
    assert user_code.load("mine.py:build", "--model") is build  # run once in a process
    with pytest.raises(ZeroDivisionError) as failed:
        user_code.load("mine.py:broken", "--model")()
    last = failed.tb.tb_next
    assert last
    return [build(), linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()]


def test_a_host_that_lacks_the_user_s_file_runs_rank_0_s(jobs: Results) -> None:
    assert jobs[3]["loads"] == [["ours", "1 / 0"]] * 3  # with its lines in tracebacks
