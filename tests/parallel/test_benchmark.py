"""The benchmarks on real ranks: what they write, what they judge, and that they measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.options import TUTORIAL
from tests.ranks import CHECKOUT, Jobs, command, environment, once, run_all

# To measure all-reduces.
FEW_SIZES = ("--factor", 64, "--max-bytes", "1M", "--seconds", 0.02, "--repeats", 2)


# No multiple of what two or three ranks use in a step.
FED = """
import numpy as np
import hvd_cifar

def load():
    images = np.random.default_rng(5).integers(0, 256, (2950, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(len(images)) % 10
    return hvd_cifar.Dataset.from_arrays(images, labels, images[:10], labels[:10])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that all jobs read and write."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "mine.py").write_text(MINE)
    (folder / "own.py").write_text(OVER_ALL_RANKS)
    (folder / "fed.py").write_text(FED)
    return folder


@pytest.fixture(scope="module")
def jobs(embedded: Path, folder: Path) -> Jobs:
    """What the functions and commands below returned in a job, by their names and by rank: each job starts once.

    Horovod registers process sets when it starts: what measures two of three ranks comes first.
    """

    def benchmark(name: str, *words: Any) -> Callable[..., Any]:
        return partial(command, ["benchmark", *words, "--json", folder / f"{name}.json"])

    short = ("--batch-size", 4, "--steps", 2)
    emulated = ("step", *TUTORIAL, embedded, "--emulate-compute", "40ms", "--steps", 2, "--repeats", 2)
    half = ("--precision", "float64", "--compression", "fp16", "--ranks", 2, "--min-efficiency", 0.001)
    own = ("--model", folder / "mine.py:build", "--dataset", folder / "mine.py:load")
    buckets = ("--overlap", "on", "--bucket-bytes", "1K")
    fed = ("--model", "tutorial", "--dataset", folder / "fed.py:load")
    feed = ("input", *fed, "--batch-size", 100, "--repeats", 1, "--plot")
    functions: dict[tuple[int, str], dict[str, Callable[..., Any]]] = {
        (2, "mpirun"): {
            # First, since other functions leave threads, whose processor time would count.
            "emulated": benchmark("emulated", *emulated),
            "emulated in buckets": partial(
                _with_messages,
                ["benchmark", *emulated, "--bucket-bytes", "64K", "--json", folder / "emulated in buckets.json"],
            ),
            "updates": _emulated_updates,
            "refused": partial(_refusal, str(embedded), str(folder)),
            "one wrong": partial(_one_value_wrong, str(folder / "one wrong.json")),
            "own net": benchmark("own net", "step", *own, *short, "--repeats", 1, *buckets),
            "loose": benchmark("loose", "step", *TUTORIAL, embedded, *short, "--repeats", 2, *half),
        },
        (3, "mpirun"): {
            "weights": partial(_weights_after_steps, str(embedded)),
            "images": partial(_images_of_ways, f"{folder}/mine.py"),
            "fed": benchmark("fed by mpirun", *feed, folder / "fed by mpirun.png"),
        },
        (2, "gloo"): {
            "fed": benchmark("fed by gloo", *feed, folder / "fed by gloo.png"),
            "allreduce": benchmark("allreduce", "allreduce", *FEW_SIZES),
        },
    }
    return once(lambda n, launcher: run_all(functions[n, launcher], n, launcher=launcher, timeout=400))


def _succeeds(ranks: list[dict[str, Any]]) -> None:
    """A `command` ended well on all ranks, and only rank 0 printed."""
    assert [rank["code"] for rank in ranks] == [0] * len(ranks), ranks
    assert not any(rank["said"] for rank in ranks[1:])


def _benchmark(n: int, *argv: Any) -> subprocess.CompletedProcess[str]:
    launcher = ["mpirun", "-q", "-np", str(n), "--bind-to", "none"]
    words = [*launcher, sys.executable, "-m", "hvd_cifar", "benchmark", *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment(), cwd=CHECKOUT)


def test_the_step_is_measured_on_1_and_2_of_3_ranks_and_judged(embedded: Path, tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    words = [*TUTORIAL, embedded, "--batch-size", 4, "--steps", 2, "--repeats", 2]
    done = _benchmark(
        3, "step", *words, "--ranks", "1,2", "--min-efficiency", 1, "--json", output, "--plot", tmp_path / "step.png"
    )
    assert output.exists(), done.stdout + done.stderr
    found = json.loads(output.read_text())
    # The all-reduce of 4 MiB takes a good part of a step of 4 images, and yet a busy machine may find more than 1.
    efficiency = found["worlds"][1]["efficiency"]["mean"]
    said = [line for line in done.stderr.splitlines() if line.startswith("hvd_cifar: ")]
    if efficiency < 1:
        assert done.returncode == 1 and len(said) == 1, done.stdout + done.stderr
        assert f"scaling efficiency on 2 ranks is {efficiency:.4f}" in said[0]
        assert "below --min-efficiency 1" in said[0]
    else:
        assert done.returncode == 0 and said == [], done.stdout + done.stderr

    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert found["benchmark"] == "step" and found["dataset"] == "synthetic" and found["model"] == "tutorial"
    assert len(found["facts"]["hosts"]) == len(found["memory_by_rank"]) == 3
    assert all(memory["resident"] > 100 * 2**20 for memory in found["memory_by_rank"])
    assert 0 < found["waiting_cpu"] < 10
    assert [world["ranks"] for world in found["worlds"]] == [1, 2]
    for world in found["worlds"]:
        k = world["ranks"]
        for name in ("step", "compute", "lockstep", "input", "fed"):
            assert world[f"{name}_seconds"]["mean"] > 0 and world[f"{name}_seconds"]["n"] == 2
        for name in ("compute", "input", "step"):
            assert len(world[f"{name}_seconds_by_rank"]) == k
        assert len(world["communication_seconds_by_rank"]) == (k if k > 1 else 0)
        assert world["slowest"]["rank"] < k and world["slowest"]["host"] == found["facts"]["hosts"][0]
        assert world["lockstep_seconds"]["mean"] >= 0.999 * world["compute_seconds"]["mean"]
        # Ratio of means and mean of ratios both lie between the two repeats' ratios, which are 2 standard errors apart.
        assert world["efficiency"]["n"] == world["images_per_second"]["n"] == 2
        ratio = world["images_per_second"]["mean"] / world["images_per_second_alone"]["mean"]
        apart = 2 * world["efficiency"]["standard_error"]
        assert world["efficiency"]["mean"] == pytest.approx(ratio, abs=1.001 * apart + 1e-9)
        assert world["images_per_second"]["mean"] >= k * 4 / world["step_seconds"]["mean"] * 0.999
    assert found["worlds"][0]["communication_seconds"] is None
    assert found["worlds"][1]["communication_seconds"]["mean"] > 0
    phases = found["phases"]
    assert phases["forward_seconds"] > 0 and phases["backward_seconds"] > 0
    names = [gradient["name"] for gradient in phases["gradients"]]
    assert "softmax_linear" in names[0] and "conv1" in names[-1]  # from the last layer to the first
    assert found["messages"] == [sum(gradient["bytes"] for gradient in phases["gradients"])] == [4 * 1_068_298]
    assert found["bucket_bytes"] is None
    ready = [gradient["ready_seconds"] for gradient in phases["gradients"]]
    assert ready == sorted(ready) and ready[-1] == pytest.approx(phases["backward_seconds"])


def test_a_compressed_step_that_is_efficient_enough_succeeds(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(2, "mpirun")["loose"])
    half = json.loads((folder / "loose.json").read_text())
    assert half["compression"] == "fp16" and half["messages"] == [2 * 1_068_298]


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


def test_the_step_of_an_own_net_on_an_own_data_set_is_measured(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(2, "mpirun")["own net"])
    found = json.loads((folder / "own net.json").read_text())
    assert (found["model"], found["dataset"]) == (f"{folder}/mine.py:build", "mine.py:load")
    assert [world["ranks"] for world in found["worlds"]] == [1, 2]
    assert sum(gradient["bytes"] for gradient in found["phases"]["gradients"]) == 4 * (80 * 4 + 4 + 8 + 4 * 3 + 3)
    assert found["facts"]["local_ranks"] == [0, 1]
    assert (found["overlap"], found["bucket_bytes"], found["given_bucket_bytes"]) == ("on", 1024, 1024)


@pytest.mark.parametrize(("name", "bucket_bytes"), [("emulated", None), ("emulated in buckets", 65536)])
def test_an_emulated_step_sleeps_and_sends(name: str, bucket_bytes: int | None, jobs: Jobs, folder: Path) -> None:
    """Checks structure and lower limits: on a busy machine times are longer, but never shorter than the sleep."""
    ranks = jobs(2, "mpirun")[name]
    _succeeds(ranks)
    if bucket_bytes:  # the all-reduce alone of all gradients is one message: over rank 0, and over both
        assert [rank["buckets of messages"] for rank in ranks] == [[None, None], [None]]
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["benchmark"] == "emulated step" and found["emulated_seconds"] == pytest.approx(0.04)
    assert sum(found["gradients"]) == 4 * 1_068_298 and len(found["memory_by_rank"]) == 2
    assert found["bucket_bytes"] == bucket_bytes
    assert [world["ranks"] for world in found["worlds"]] == [1, 2]
    for world in found["worlds"]:
        step, alone, rest = (world[f"{of}_seconds"]["mean"] for of in ("step", "alone", "rest"))
        assert step > 0.04 and alone > 0.04 and rest == pytest.approx(step - alone)
        assert 0 < world["alone_processor"]["mean"] < alone  # a rank sleeps, and does not poll
        assert all(world[f"{of}_seconds"]["mean"] > 0 for of in ("message", "value", "ring"))


def _with_messages(words: list[Any]) -> dict[str, Any]:
    """What `command` returns, and the buckets of the optimizers whose all-reduces are measured alone."""
    from hvd_cifar.distributed.optimizer import reduction_of
    from hvd_cifar.tools.benchmark import emulate

    seen = []

    def messages(variables: Any, optimizer: Any, ring: Any, made: Any = emulate._messages) -> Any:
        reduction = reduction_of(optimizer)
        assert reduction
        seen.append(reduction.bucket_bytes)
        return made(variables, optimizer, ring)

    with mock.patch.object(emulate, "_messages", messages):
        return {**command(words), "buckets of messages": seen}


def _emulated_updates() -> dict[str, Any]:
    """What the emulated step sends and applies, and how often it sleeps, by bytes of a bucket."""
    from hvd_cifar.distributed import DistributedOptimizer, collectives
    from hvd_cifar.runtime.world import start
    from hvd_cifar.tools.benchmark import emulate

    world = start()
    import keras

    seen: dict[str, Any] = {}
    for bucket_bytes in (None, 16):
        variables = [keras.Variable(np.zeros(n), dtype="float32", name=f"v{n}") for n in (2, 4, 1)]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum", bucket_bytes=bucket_bytes)
        optimizer.build(variables)
        sleeps: list[float] = []

        def sleep(after: Any, seconds: Any, sleeps: list[float] = sleeps) -> Any:
            sleeps.append(float(seconds))
            return np.float32(after - world.rank - 1)  # a gradient other than zero, to be seen in the variables

        with mock.patch.object(emulate, "_sleep", sleep):
            result = emulate.make_step(variables, optimizer, 0.28, bucket_bytes)().numpy().tolist()
        digests = collectives.all_gather_object(collectives.digest(variables))
        seen[str(bucket_bytes)] = {
            "result": result,
            "sleeps": sleeps,
            "values": [v.numpy()[0] for v in variables],
            "alike": len(set(digests)) == 1,
        }
    return seen


def test_an_emulated_step_sends_each_bucket_after_its_part_of_the_sleep(jobs: Jobs) -> None:
    for seen in jobs(2, "mpirun")["updates"]:
        whole, parts = seen["None"], seen["16"]
        assert whole["result"] == parts["result"] == [0.0, 0.0] and whole["alike"] and parts["alike"]
        assert whole["sleeps"] == pytest.approx([0.28])
        assert whole["values"] == [3.0] * 3  # of one sleep, the ranks' sum
        # 8 bytes of loss, 4 and 16, which close a bucket; 8.
        assert parts["sleeps"] == pytest.approx([0.28 * 28 / 36, 0.28 * 8 / 36])
        assert parts["values"] == [6.0, 3.0, 3.0]  # the first variable's gradient comes after two sleeps


OVER_ALL_RANKS = """
import hvd_cifar, keras

def build(shape, classes):
    layers = [keras.Input(shape), hvd_cifar.SyncBatchNormalization(name='all'), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(classes)])
"""


def _refusal(data: str, folder: str) -> str:
    from hvd_cifar.config import TrainSettings
    from hvd_cifar.errors import UserError
    from hvd_cifar.tools.benchmark import job, step

    given = {"model": f"{folder}/own.py:build", "dataset": "synthetic", "data_dir": data, "batch_size": 2}
    with job.start((1, 2)) as ranks:
        try:
            step.make_bench(ranks, TrainSettings.model_validate(given))
        except UserError as error:
            return str(error)
    return ""


def test_a_net_with_statistics_over_all_ranks_is_refused(jobs: Jobs) -> None:
    """One rank alone would wait in them for the others, which wait for its end."""
    for said in jobs(2, "mpirun")["refused"]:
        assert "the layer all (SyncBatchNormalization) has statistics over all ranks" in said


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


def test_all_reduces_are_measured_checked_and_fitted(tmp_path: Path) -> None:
    output = tmp_path / "allreduce.json"
    done = _benchmark(3, "allreduce", *FEW_SIZES, "--json", output, "--plot", tmp_path / "allreduce.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "allreduce.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(output.read_text())
    keys = {(p["way"], p["ranks"], p["bytes"]) for p in found["points"]}
    sizes = (4, 256, 16384, 2**20)
    assert keys == {(way, k, size) for way in ("horovod", "mpi", "copy") for k in (2, 3) for size in sizes}
    for p in found["points"]:
        assert p["wrong_values"] == 0 and p["seconds"]["n"] == 2 and p["iterations"] >= 2
        assert p["algorithm_bandwidth"] == pytest.approx(p["bytes"] / p["seconds"]["mean"])
        factor = 1 if p["way"] == "copy" else {2: 1, 3: 4 / 3}[p["ranks"]]
        assert p["bus_bandwidth"] == pytest.approx(p["algorithm_bandwidth"] * factor)
    # Of 16 KiB and 1 MiB on two numbers of ranks.
    assert set(found["fits"]) == {"horovod", "mpi", "processor"} and len(found["fits"]["mpi"]["errors"]) == 4
    assert found["skipped"] == {}


def test_over_gloo_all_reduces_are_measured_without_those_of_mpi(jobs: Jobs, folder: Path) -> None:
    _succeeds(jobs(2, "gloo")["allreduce"])
    found = json.loads((folder / "allreduce.json").read_text())
    assert {p["way"] for p in found["points"]} == {"horovod", "copy"} and "Gloo" in found["skipped"]["mpi"]


def _one_value_wrong(output: str) -> str:
    from hvd_cifar import config
    from hvd_cifar.errors import TrainingError
    from hvd_cifar.tools.benchmark import allreduce, commands

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
            commands.benchmark_allreduce(config.make(config.BenchmarkAllreduceSettings, values))
    except TrainingError as error:
        return str(error)
    return "nothing was found"


def test_one_wrong_value_on_one_rank_is_found_by_all(jobs: Jobs, folder: Path) -> None:
    said = jobs(2, "mpirun")["one wrong"]
    assert said[0] == said[1]
    assert "1 values of an all-reduce of 64 bytes (horovod) on 2 ranks;" in said[0]
    points = json.loads((folder / "one wrong.json").read_text())["points"]
    assert [(p["way"], p["bytes"]) for p in points if p["wrong_values"]] == [("horovod", 64)]


@pytest.mark.parametrize(("ranks", "launcher", "controller"), [(2, "gloo", "gloo"), (3, "mpirun", "mpi")])
def test_ranks_are_fed_in_three_ways(ranks: int, launcher: str, controller: str, jobs: Jobs, folder: Path) -> None:
    done = jobs(ranks, launcher)["fed"]
    _succeeds(done)
    plot = folder / f"fed by {launcher}.png"
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size < 100_000
    found = json.loads((folder / f"fed by {launcher}.json").read_text())
    assert (found["benchmark"], found["facts"]["controller"]) == ("input", controller)
    examples, bytes_of_batch = found["examples"], 100 * 24 * 24 * 3 * 4
    ways = {way["way"]: way for way in found["ways"]}
    assert list(ways) == ["split", "drawn", "sharded"]
    for name, way in ways.items():
        assert way["images_per_second"]["mean"] > 0 and way["images_per_second"]["n"] == 1
        parts = sum(rank["mean"] for rank in way["processor_seconds_by_rank"])
        assert way["processor_seconds"]["mean"] == pytest.approx(parts) and parts > 0
        assert len(way["epochs"]) == 1 and len(way["ranks_of_first"]) == 200
        for epoch in way["epochs"]:
            assert epoch["never"] + epoch["once"] + epoch["more"] == sum(epoch["by_ranks"]) == examples
            assert sum(epoch["uses_by_rank"]) == examples and len(epoch["by_ranks"]) == ranks + 1
            assert max(epoch["uses_by_rank"]) - min(epoch["uses_by_rank"]) <= 1  # of the last, ragged batch
            assert sum(epoch["different_by_rank"]) == sum(k * count for k, count in enumerate(epoch["by_ranks"]))
            if name == "drawn":
                # Six standard deviations of the number of examples that nobody draws, or fewer: draws exclude others.
                expected = (1 - 1 / ranks) ** ranks
                assert abs(epoch["never"] - expected * examples) < 6 * (expected * (1 - expected) * examples) ** 0.5
                assert epoch["more"] == sum(epoch["by_ranks"][2:]) > 0.1 * examples
            else:
                assert epoch["once"] == epoch["by_ranks"][1] == examples
        used = [len(of_example) for of_example in way["ranks_of_first"]]
        assert (set(used) == {1}) == (name != "drawn")
    # Rank 0 holds whole batches and its part of one; another rank holds a part.
    of_root, *others = ways["split"]["held_by_rank"]
    assert of_root >= (ranks + 1) * bytes_of_batch and others == [bytes_of_batch] * (ranks - 1)
    for name in ("drawn", "sharded"):
        assert all(bytes_of_batch <= held <= 6 * bytes_of_batch for held in ways[name]["held_by_rank"])
    table = "\n".join(done[0]["said"])
    assert "expected never" in table and "twice or more" in table


def _images_of_ways(program: str) -> dict[str, list[list[tuple[int, str]]]]:
    from hashlib import sha256

    from hvd_cifar.config import BenchmarkInputSettings, make
    from hvd_cifar.tools.benchmark import feeding, job, step
    from hvd_cifar.training.assemble import prepare

    options = make(BenchmarkInputSettings, {"model": "tutorial", "dataset": f"{program}:load", "batch_size": 7})
    with job.start((), least=2) as ranks:
        feeds = feeding.Feeds(ranks, prepare(step.train_settings(options), ranks.world))
        found: dict[str, list[list[tuple[int, str]]]] = {}
        for way in feeding.WAYS:
            batches = [(batch.example.numpy(), batch.image.numpy()) for batch in feeds.batches(way, 1)]
            found[way] = [[(int(e), sha256(i.tobytes()).hexdigest()) for e, i in zip(*b, strict=True)] for b in batches]
        return found


def test_a_split_batch_has_the_images_of_the_shards(jobs: Jobs) -> None:
    """In each step the examples and the pixels are the same. Each rank's part differs, and so do drawn batches."""
    by_rank = jobs(3, "mpirun")["images"]
    steps = {
        way: [sorted(sum(step, [])) for step in zip(*(r[way] for r in by_rank), strict=True)] for way in by_rank[0]
    }
    assert [len(step) for step in steps["split"]] == [21, 21, 18]
    assert steps["split"] == steps["sharded"] != steps["drawn"]
    assert by_rank[0]["split"] != by_rank[0]["sharded"]
    assert sorted(example for step in steps["sharded"] for example, _ in step) == list(range(60))
    assert len({example for step in steps["drawn"] for example, _ in step}) < 60


CUT = """
import numpy as np
from hvd_cifar import Dataset
from hvd_cifar.errors import UserError

class Images:
    dtype = np.dtype(np.uint8)
    shape = 60, 8, 10, 3

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if not isinstance(index, slice) and len(index) == 8:  # a whole batch, which only rank 0 reads, for `split`
            raise UserError("images.bin has become shorter: restore it")
        return np.zeros((60, 8, 10, 3), np.uint8)[index]

def load():
    return Dataset.from_arrays(Images(), np.arange(60) % 3, np.zeros((9, 8, 10, 3), np.uint8), np.arange(9) % 3)
"""


def test_rank_0_that_cannot_make_a_batch_to_split_ends_the_job(tmp_path: Path) -> None:
    """The other rank waits for its part, in a collective."""
    (tmp_path / "mine.py").write_text(CUT)
    output = tmp_path / "input.json"
    words = ["--model", "tutorial", "--dataset", tmp_path / "mine.py:load", "--batch-size", 4, "--json", output]
    done = _benchmark(2, "input", *words)
    said = [line for line in done.stderr.splitlines() if line.startswith("hvd_cifar: ")]
    assert done.returncode == 2 and not output.exists(), done.stdout + done.stderr
    assert said == ["hvd_cifar: images.bin has become shorter: restore it"], done.stderr
    assert "Traceback" not in done.stderr
