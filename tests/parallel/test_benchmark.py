"""The benchmarks on real ranks: what they write, what they judge, and that they measure what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.options import FEW, SMALL_NET
from tests.ranks import Jobs, command, error_of, run_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that all jobs write."""
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Jobs:
    """What the functions and commands below returned on 2 ranks, by their names and by rank: the job starts once."""

    def benchmark(name: str, *words: Any) -> Callable[..., Any]:
        return partial(command, ["benchmark", *words, "--json", folder / f"{name}.json"])

    short = ("--batch-size", 4, "--steps", 2, "--repeats", 2)
    buckets = ("--overlap", "on", "--bucket-bytes", "1KiB", "--min-efficiency", 0.001)
    few_sizes = ("--factor", 64, "--max-bytes", "1MiB")
    functions: dict[str, Callable[..., Any]] = {
        "weights": _weights_after_steps,
        "step": benchmark("step", "step", "--model", SMALL_NET, "--dataset", FEW, *short, *buckets),
        "allreduce": benchmark("allreduce", "allreduce", *few_sizes),
        "one wrong": partial(_one_value_wrong, str(folder / "one wrong.json")),
    }
    return cache(lambda n: run_all(functions, n, timeout=400))


def _succeeds(ranks: list[dict[str, Any]]) -> None:
    """A `command` ended well on all ranks, and only rank 0 printed."""
    assert [rank["code"] for rank in ranks] == [0] * len(ranks), ranks
    assert not any(rank["said"] for rank in ranks[1:])


def test_the_step_is_measured(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(2)["step"])
    found = json.loads((folder / "step.json").read_text())
    assert (found["dataset"], found["model"], found["bucket_bytes"]) == ("small.py:few", SMALL_NET, 1024)
    assert len(found["facts"]["hosts"]) == len(found["compute_by_rank"]) == 2
    for name in ("step", "compute", "fed"):
        assert found[f"{name}_seconds"]["mean"] > 0 and found[f"{name}_seconds"]["n"] == 2
    # Ratio of means and mean of ratios both lie between the two repeats' ratios, which are 2 standard errors apart.
    ratio = found["images_per_second"]["mean"] / found["images_per_second_alone"]["mean"]
    apart = 2 * found["efficiency"]["standard_error"]
    assert found["efficiency"]["mean"] == pytest.approx(ratio, abs=1.001 * apart + 1e-9)


def _weights_after_steps() -> dict[str, Any]:
    from hvd_cifar.config import TrainSettings
    from hvd_cifar.distributed import collectives
    from hvd_cifar.runtime.world import session
    from hvd_cifar.tools.benchmark import step

    given = {"model": SMALL_NET, "dataset": FEW, "batch_size": 2, "compression": "fp16"}
    with session() as world:
        bench = step.Bench(world, TrainSettings.model_validate(given))
        variables = bench.net.model.variables
        start = [v.numpy() for v in variables]
        digests = {"first": collectives.digest(variables)}
        for way in ("compute", "step", "fed"):
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
            bench.time(way, 1)
            digests[way] = collectives.digest(variables)
        return digests


def test_one_way_communicates_and_the_other_does_not(jobs: Jobs) -> None:
    one, other = jobs(2)["weights"]
    assert one["first"] == other["first"]
    # Every rank has a batch of its own: alone, each goes its own way; together, they stay as one.
    assert one["compute"] != other["compute"]
    for way in ("step", "fed"):
        assert one[way] == other[way] not in (one["first"], one["compute"], other["compute"])


def test_all_reduces_are_measured_and_checked(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(2)["allreduce"])
    points = json.loads((folder / "allreduce.json").read_text())["points"]
    assert [p["bytes"] for p in points] == [4, 256, 16384, 2**20]
    for p in points:
        assert p["wrong_values"] == 0 and p["seconds"]["n"] == 5 and p["iterations"] >= 5
        assert p["algorithm_bandwidth"] == pytest.approx(p["bytes"] / p["seconds"]["mean"])
        assert p["bus_bandwidth"] == pytest.approx(p["algorithm_bandwidth"])  # of two ranks


def _one_value_wrong(output: str) -> str:
    import horovod.tensorflow as hvd

    from hvd_cifar import config
    from hvd_cifar.tools.benchmark import allreduce
    from hvd_cifar.tools.settings import BenchmarkAllreduceSettings

    reduce = allreduce.through_horovod()

    def spoilt(terms: Any) -> Any:
        sums = reduce(terms).numpy()
        if hvd.rank() == 1 and len(sums) == 16:
            sums[5] += 1
        return sums

    values = {"max_bytes": "1KiB", "factor": 4, "json_file": output}
    with mock.patch.object(allreduce, "through_horovod", lambda: spoilt):
        return error_of(allreduce.benchmark_allreduce, config.make(BenchmarkAllreduceSettings, values))


def test_one_wrong_value_on_one_rank_is_found_by_all(jobs: Jobs, folder: Path) -> None:
    said = jobs(2)["one wrong"]
    assert said[0] == said[1]
    assert "1 values of an all-reduce of 64 bytes;" in said[0]
    points = json.loads((folder / "one wrong.json").read_text())["points"]
    assert [p["bytes"] for p in points if p["wrong_values"]] == [64]
