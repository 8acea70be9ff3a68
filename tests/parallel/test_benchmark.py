"""The benchmarks on real ranks: what they write, what they judge, and that they measure what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.options import TUTORIAL
from tests.ranks import Jobs, command, once, run_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that all jobs read and write."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def jobs(embedded: Path, folder: Path) -> Jobs:
    """What the functions and commands below returned in a job, by their names and by rank: each job starts once.

    Horovod registers process sets when it starts: what measures two of three ranks comes first.
    """

    def benchmark(name: str, *words: Any) -> Callable[..., Any]:
        return partial(command, ["benchmark", *words, "--json", folder / f"{name}.json"])

    short = ("--batch-size", 4, "--steps", 2)
    own = ("--model", folder / "mine.py:build", "--dataset", folder / "mine.py:load")
    buckets = ("--overlap", "on", "--bucket-bytes", "1K", "--min-efficiency", 0.001)
    few_sizes = ("--factor", 64, "--max-bytes", "1M", "--seconds", 0.02, "--repeats", 2)
    functions: dict[int, dict[str, Callable[..., Any]]] = {
        2: {
            "one wrong": partial(_one_value_wrong, str(folder / "one wrong.json")),
            "own net": benchmark("own net", "step", *own, *short, "--repeats", 1, *buckets),
        },
        3: {
            "weights": partial(_weights_after_steps, str(embedded)),
            "step": benchmark("step", "step", *TUTORIAL, embedded, *short, "--repeats", 2, "--ranks", 3),
            "allreduce": benchmark("allreduce", "allreduce", *few_sizes, "--ranks", 3),
        },
    }
    return once(lambda n, launcher: run_all(functions[n], n, launcher=launcher, timeout=400, fresh=True))


def _succeeds(ranks: list[dict[str, Any]]) -> None:
    """A `command` ended well on all ranks, and only rank 0 printed."""
    assert [rank["code"] for rank in ranks] == [0] * len(ranks), ranks
    assert not any(rank["said"] for rank in ranks[1:])


def test_the_step_is_measured_on_3_ranks(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(3, "mpirun")["step"])
    found = json.loads((folder / "step.json").read_text())
    assert (found["benchmark"], found["dataset"], found["model"]) == ("step", "synthetic", "tutorial")
    assert len(found["facts"]["hosts"]) == 3
    (world,) = found["worlds"]
    assert world["ranks"] == len(world["compute_by_rank"]) == 3
    for name in ("step", "compute", "lockstep", "fed", "communication"):
        assert world[f"{name}_seconds"]["mean"] > 0 and world[f"{name}_seconds"]["n"] == 2
    assert world["lockstep_seconds"]["mean"] >= 0.999 * world["compute_seconds"]["mean"]
    # Ratio of means and mean of ratios both lie between the two repeats' ratios, which are 2 standard errors apart.
    ratio = world["images_per_second"]["mean"] / world["images_per_second_alone"]["mean"]
    apart = 2 * world["efficiency"]["standard_error"]
    assert world["efficiency"]["mean"] == pytest.approx(ratio, abs=1.001 * apart + 1e-9)
    phases = found["phases"]
    names = [gradient["name"] for gradient in phases["gradients"]]
    assert "softmax_linear" in names[0] and "conv1" in names[-1]  # from the last layer to the first
    assert sum(gradient["bytes"] for gradient in phases["gradients"]) == 4 * 1_068_298
    ready = [gradient["ready_seconds"] for gradient in phases["gradients"]]
    assert ready == sorted(ready) and ready[-1] == pytest.approx(phases["backward_seconds"])


MINE = """
import keras, numpy as np
from hvd_cifar import Dataset

def build(image_shape, classes):
    dense = keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(classes)
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), *dense])

def load():
    images = np.arange(60 * 8 * 10, dtype=np.uint8).reshape(60, 8, 10)
    return Dataset.from_arrays(images, np.arange(60) % 3, images[:9], np.arange(9) % 3)
"""


def test_the_step_of_an_own_net_on_an_own_data_set_is_measured_and_judged(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(2, "mpirun")["own net"])
    found = json.loads((folder / "own net.json").read_text())
    assert (found["model"], found["dataset"]) == (f"{folder}/mine.py:build", "mine.py:load")
    assert [world["ranks"] for world in found["worlds"]] == [1, 2]
    assert found["worlds"][0]["communication_seconds"] is None
    assert sum(gradient["bytes"] for gradient in found["phases"]["gradients"]) == 4 * (80 * 4 + 4 + 8 + 4 * 3 + 3)
    assert found["facts"]["local_ranks"] == [0, 1] and found["bucket_bytes"] == 1024


def _weights_after_steps(data: str) -> dict[str, Any]:
    from hvd_cifar.config import TrainSettings
    from hvd_cifar.distributed import collectives
    from hvd_cifar.tools.benchmark import job, step

    given = {"model": "tutorial", "dataset": "synthetic", "data_dir": data, "batch_size": 2, "compression": "fp16"}
    settings = TrainSettings.model_validate(given)
    with job.start((2,)) as ranks:
        bench = step.make_bench(ranks, settings)
        variables = bench.net.model.variables
        start = [v.numpy() for v in variables]
        digests = {"first": collectives.digest(variables)}
        for way in ("compute", "step", "fed"):
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
            bench.time(2, way, 1)
            digests[way] = collectives.digest(variables)
        return {**digests, "bytes": sum(bench.backward(1)[0].sizes)}


def test_one_way_communicates_and_the_other_does_not(jobs: Jobs) -> None:
    ranks = jobs(3, "mpirun")["weights"]
    assert len({rank["first"] for rank in ranks}) == 1
    assert {rank.pop("bytes") for rank in ranks} == {2 * 1_068_298}  # in half precision, as they are sent
    # Every rank has a batch of its own: alone, each goes its own way; together, they stay as one.
    assert len({rank["compute"] for rank in ranks[:2]}) == 2
    for way in ("step", "fed"):
        assert ranks[0][way] == ranks[1][way] != ranks[0]["first"]
        assert ranks[0][way] not in {rank["compute"] for rank in ranks}
    # The third rank is no member of the group, and waits.
    assert set(ranks[2].values()) == {ranks[2]["first"]}


def test_all_reduces_are_measured_and_checked(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(3, "mpirun")["allreduce"])
    found = json.loads((folder / "allreduce.json").read_text())
    keys = [(p["ranks"], p["bytes"]) for p in found["points"]]
    assert keys == [(3, size) for size in (4, 256, 16384, 2**20)]
    for p in found["points"]:
        assert p["wrong_values"] == 0 and p["seconds"]["n"] == 2 and p["iterations"] >= 2
        assert p["algorithm_bandwidth"] == pytest.approx(p["bytes"] / p["seconds"]["mean"])
        assert p["bus_bandwidth"] == pytest.approx(p["algorithm_bandwidth"] * 4 / 3)


def _one_value_wrong(output: str) -> str:
    from hvd_cifar import config
    from hvd_cifar.errors import TrainingError
    from hvd_cifar.tools.benchmark import allreduce, commands
    from hvd_cifar.tools.settings import BenchmarkAllreduceSettings

    true_sum = allreduce.through_horovod

    def through_horovod(process_set: Any) -> allreduce.Reduce:
        reduce = true_sum(process_set)

        def spoilt(terms: Any) -> Any:
            sums = reduce(terms).numpy()
            if process_set.rank() == 1 and len(sums) == 16:
                sums[5] += 1
            return sums

        return spoilt

    values = {"max_bytes": "1K", "factor": 4, "seconds": 0.01, "repeats": 1, "json_file": output}
    try:
        with mock.patch.object(allreduce, "through_horovod", through_horovod):
            commands.benchmark_allreduce(config.make(BenchmarkAllreduceSettings, values))
    except TrainingError as error:
        return str(error)
    return "nothing was found"


def test_one_wrong_value_on_one_rank_is_found_by_all(jobs: Jobs, folder: Path) -> None:
    said = jobs(2, "mpirun")["one wrong"]
    assert said[0] == said[1]
    assert "1 values of an all-reduce of 64 bytes on 2 ranks;" in said[0]
    points = json.loads((folder / "one wrong.json").read_text())["points"]
    assert [p["bytes"] for p in points if p["wrong_values"]] == [64]
