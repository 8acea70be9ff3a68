"""Gradients sent as bfloat16 and as thin matrices, on real ranks, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import runs
from tests.options import SMALL_NET
from tests.ranks import Jobs, once, run_all

LENGTHS = {"short": 7, "long": 5001}  # one all-gather; all-to-all and all-gather, in parts of unequal length


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directories of `_course`."""
    return tmp_path_factory.mktemp("courses")


@pytest.fixture(scope="module")
def jobs(embedded: Path, courses: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""
    muon = partial(_muon_of_low_rank, str(embedded), str(tmp_path_factory.mktemp("muon")))
    both = {"bf16": _bf16, "powersgd": _powersgd}

    def course(name: str, steps: int) -> Callable[..., Any]:
        return partial(_course, str(embedded), str(courses / name), steps)

    functions: dict[int, dict[str, Callable[..., Any]]] = {
        1: {"powersgd": _powersgd, "refused": _refused, "muon": muon, "alone": course("alone", 8)},
        2: {**both, "together": course("together", 8), "cut": course("cut", 8)},
        3: {**both, "cut": course("cut", 5)},
        4: {"levels": _bf16_in_levels},
    }

    def start(n: int, launcher: str) -> dict[str, list[Any]]:
        if n == 2:
            results(3, launcher)  # has made the first five steps
        return run_all(functions[n], n, launcher=launcher, timeout=900)

    results = once(start)
    return results


def _terms(ranks: int, length: int) -> Any:
    """float32 of very different size by rank: [ranks, length]; others at each number of ranks."""
    draw = np.random.default_rng(ranks)
    return (draw.normal(size=(ranks, length)) * 10.0 ** draw.uniform(-20, 20, length)).astype(np.float32)


def _patterns() -> Any:
    """All values of bfloat16: as float16, which carries the bits, many of them are NaN or subnormal."""
    import tensorflow as tf

    return np.arange(2**16, dtype=np.uint16).view(tf.bfloat16.as_numpy_dtype)


def _bf16() -> dict[str, list[float]]:
    """Bits of what bfloat16 on the wire makes of gradients, by every way."""
    from hvd_cifar.runtime.world import start

    world = start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.distributed.fixed_order import all_reduce_in_tree

    ways: dict[str, dict[str, Any]] = {
        "sum": {"op": "sum"},
        "average": {},
        "sum, fixed order": {"op": "sum", "fixed_order": True},
        "sum, buckets": {"op": "sum", "bucket_bytes": 1},
        "sum, passes": {"op": "sum", "backward_passes_per_step": 2},
    }
    seen: dict[str, list[float]] = {}
    for length, n in LENGTHS.items():
        term = tf.constant(-_terms(world.size, n)[world.rank])
        for way, options in ways.items():
            for graph in (False, True):
                variables = [keras.Variable(np.zeros(n, "float32")), keras.Variable(np.zeros((1, n), "float32"))]
                optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression="bf16", **options)
                optimizer.build(variables)
                apply = tf.function(optimizer.apply, autograph=False) if graph else optimizer.apply
                for _ in range(options.get("backward_passes_per_step", 1)):
                    apply([term, 2.0 * term[None, :]])
                for name, variable in zip(("", "doubled "), variables, strict=True):
                    bits = variable.numpy().ravel().view(np.uint32).tolist()
                    seen[f"{length}, {name}{way}{', graph' * graph}"] = bits
    table = keras.Variable(np.zeros((3, 1), "float32"))
    rows = tf.IndexedSlices(tf.constant([[-1 / 3], [-1e-30]]), tf.constant([world.rank % 2, 2]), tf.constant([3, 1]))
    DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum", compression="bf16").apply([rows], [table])
    seen["sparse"] = table.numpy().ravel().tolist()
    mine = tf.constant(_patterns() if world.rank == 1 else np.zeros(2**16, np.float32), tf.bfloat16)
    for gather in (False, True):
        (total,) = all_reduce_in_tree([mine], gather=gather)
        seen[f"patterns, {gather}"] = total.numpy().view(np.uint16).tolist()
    return seen


def _bf16_in_levels() -> dict[str, Any]:
    """Sums of four ranks as if they were on two hosts, and the start-up proof of this way."""
    from hvd_cifar.runtime.world import start

    world = start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer, prove_averaging

    def wrap(optimizer: Any) -> Any:
        return DistributedOptimizer(optimizer, op="sum", compression="bf16", hosts=2)

    term = tf.constant(_terms(world.size, LENGTHS["long"])[world.rank])
    reduce = wrap(keras.optimizers.SGD(1.0)).reduce
    in_graph = tf.function(lambda values: reduce([values])[0], autograph=False)
    return {
        "eager": reduce([term])[0].numpy().tolist(),
        "graph": in_graph(term).numpy().tolist(),
        "proof": prove_averaging(wrap, contributions="sum"),
    }


def test_bfloat16_in_two_levels_is_rounded_on_each_host_also(jobs: Jobs) -> None:
    import tensorflow as tf

    def rounded(values: Any) -> Any:
        return values.astype(tf.bfloat16.as_numpy_dtype).astype(np.float32)

    ranks = jobs(4, "mpirun")["levels"]
    assert ranks == [ranks[0]] * 4
    terms = rounded(_terms(4, LENGTHS["long"]))
    of_hosts = rounded(terms[::2] + terms[1::2])
    wanted = rounded(of_hosts[0] + of_hosts[1])
    assert (wanted != rounded((terms[0] + terms[1]) + (terms[2] + terms[3]))).mean() > 0.1  # one level has others
    for way in ("eager", "graph"):
        assert np.array_equal(np.array(ranks[0][way], np.float32), wanted), way
    assert "their average, on all 4 ranks" in ranks[0]["proof"]


@pytest.mark.parametrize(
    ("local_ranks", "hosts"),
    [
        ([0, 1, 0, 1], 2),
        ([0, 1, 2, 0, 1, 2], 2),
        ([0, 0, 0], 3),
        ([0, 1, 2], 1),
        ([0, 0, 1, 1], 1),
        ([0, 1, 0], 1),
        ([0, 0, 1, 2], 1),
        ([], 1),
    ],
)
def test_hosts_are_alike_where_each_has_as_many_neighbouring_ranks(local_ranks: list[int], hosts: int) -> None:
    from hvd_cifar.distributed.fixed_order import hosts_alike

    assert hosts_alike(local_ranks) == hosts_alike(tuple(local_ranks)) == hosts


@pytest.mark.parametrize("n", [2, 3])
def test_bfloat16_is_rounded_once_before_the_sum_and_once_after_it(n: int, jobs: Jobs) -> None:
    import tensorflow as tf

    half = tf.bfloat16.as_numpy_dtype

    def total(terms: Any) -> Any:
        first, second, *rest = terms.astype(half).astype(np.float32)
        return sum(rest, first + second).astype(half).astype(np.float32)

    ranks = jobs(n, "mpirun")["bf16"]
    assert all(found == ranks[0] for found in ranks)
    sparse = np.array(ranks[0].pop("sparse"), np.float32)
    third, least = (np.float32(half(value)) for value in (1 / 3, 1e-30))
    assert np.allclose(sparse, [third * (n - 1 if n == 3 else 1), third, n * least], rtol=1e-6)
    patterns = _patterns().astype(np.float32)
    subnormal = (patterns != 0) & (np.abs(patterns) < np.finfo(np.float32).tiny)  # TensorFlow makes them 0
    for gather in (False, True):
        found = np.array(ranks[0].pop(f"patterns, {gather}"), np.uint16).view(half).astype(np.float32)
        assert np.array_equal(found[~subnormal], patterns[~subnormal], equal_nan=True)
    for length, size in LENGTHS.items():
        sums = total(_terms(n, size))
        assert (sums != _terms(n, size).sum(axis=0)).mean() > 0.5
        for way, bits in ranks[0].items():
            if way.startswith(length):
                wanted = sums / np.float32(n) if "average" in way else sums * np.float32(1 + ("passes" in way))
                wanted = wanted * np.float32(1 + ("doubled" in way))
                # TensorFlow turns a division by 3 in a graph into a product.
                rounding = 2e-7 if "average" in way else 0
                assert np.allclose(np.array(bits, np.uint32).view(np.float32), wanted, rtol=rounding, atol=0), way


SHAPES: dict[str, tuple[int, ...]] = {"kernel": (3, 3, 4, 20), "dense": (30, 12), "few": (2, 3), "bias": (20,)}
COMPRESSED = ("kernel", "dense")
STEPS, RANK = 4, 2  # no gradient in the second step


def _gradients(ranks: int, step: int) -> list[Any]:
    """Of each variable [ranks, ...] in float64."""
    draw = np.random.default_rng([ranks, step])
    return [(step != 1) * draw.normal(size=(ranks, *shape)) for shape in SHAPES.values()]


def _powersgd() -> dict[str, Any]:
    """Variables after 4 steps, by every way; of the first way also what is kept."""
    from hvd_cifar.runtime.world import start

    world = start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.distributed.optimizer import memory_of

    ways: dict[str, dict[str, Any]] = {
        "sum": {"op": "sum"},
        "average": {},
        "sum, float32": {"op": "sum"},
        "average, fixed order": {"fixed_order": True},
        "sum, buckets": {"op": "sum", "bucket_bytes": 1},
        "sum, passes": {"op": "sum", "backward_passes_per_step": 2},
        "sum, loss scale": {"op": "sum"},
    }
    seen: dict[str, Any] = {}
    for way, options in ways.items():
        dtype = "float32" if way.endswith("float32") else "float64"
        variables = [keras.Variable(np.zeros(shape), dtype=dtype) for shape in SHAPES.values()]
        wrapped = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=f"powersgd:{RANK}", **options)
        optimizer: Any = wrapped
        if "loss scale" in way:
            optimizer = keras.optimizers.LossScaleOptimizer(wrapped, initial_scale=4.0)
        optimizer.build(variables)
        apply = optimizer.apply if way == "average" else tf.function(optimizer.apply, autograph=False)
        for step in range(STEPS):
            mine = [tf.constant(g[world.rank], dtype) for g in _gradients(world.size, step)]
            if "loss scale" in way:
                poison = np.inf if world.rank == world.size - 1 else 1.0
                apply([g * poison for g in mine])  # skipped by all ranks: what is kept stays
                scale = float(optimizer.dynamic_scale.numpy())
                mine = [g * scale for g in mine]
            passes = options.get("backward_passes_per_step", 1)
            for _ in range(passes):
                apply([g / passes for g in mine])
        seen[way] = [v.numpy().tolist() for v in variables]
        if way == "sum":
            seen["errors"] = [memory.error.numpy().tolist() for memory in memory_of(optimizer)]
            seen["rights"] = [memory.right.numpy().tolist() for memory in memory_of(optimizer)]
            seen["listed"] = [v.path for v in optimizer.variables]
    return seen


def _powersgd_by_hand(ranks: int) -> dict[str, Any]:
    """The same in NumPy, by the paper's Algorithms 1 and 2, with the shares of sums."""
    ended: dict[str, Any] = {"variables": [], "errors": []}
    for index, (name, shape) in enumerate(SHAPES.items()):
        by_step = [_gradients(ranks, step)[index] for step in range(STEPS)]
        if name not in COMPRESSED:
            ended["variables"].append(-sum(g.sum(axis=0) for g in by_step))
            continue
        errors: Any = np.zeros((ranks, np.prod(shape[:-1]), shape[-1]))
        right = np.random.default_rng(index).normal(size=(shape[-1], RANK))
        value: Any = np.zeros(shape)
        for gradient in by_step:
            matrices = gradient.reshape(errors.shape) + errors
            basis, _ = np.linalg.qr(sum(m @ right for m in matrices))
            right = sum(m.T @ basis for m in matrices)
            result = basis @ right.T
            errors = matrices - result / ranks
            value = value - result.reshape(shape)
        ended["variables"].append(value)
        ended["errors"].append(errors)
    return ended


@pytest.mark.parametrize("n", [1, 2, 3])
def test_powersgd_equals_the_algorithm_of_the_paper(n: int, jobs: Jobs) -> None:
    by_hand = _powersgd_by_hand(n)
    ranks = jobs(n, "mpirun")["powersgd"]
    errors = [found.pop("errors") for found in ranks]
    assert all(found == ranks[0] for found in ranks)  # to the bit
    found = ranks[0]
    assert len(found.pop("rights")) == len(COMPRESSED)
    assert [path.split("/")[-1] for path in found.pop("listed")] == ["iteration", "learning_rate"]
    for rank, own in enumerate(errors):
        for error, reference in zip(own, by_hand["errors"], strict=True):
            assert np.abs(reference).max() > 1
            assert np.allclose(error, n * reference[rank], rtol=0, atol=1e-10)
    for way, values in found.items():
        divisor = n if way.startswith("average") else 1
        for value, reference in zip(values, by_hand["variables"], strict=True):
            near = 1e-3 if way.endswith("float32") else 1e-10
            assert np.allclose(value, reference / divisor, rtol=0, atol=near), way


def _course(data: str, run_dir: str, steps: int) -> None:
    import hvd_cifar

    course: dict[str, Any] = {"global_batch_size": 24, "precision": "float64", "learning_rate": 0.01, "log_every": 1}
    course |= {"eval_every": 0, "check_sync_every": 2, "compression": "powersgd:2"}
    hvd_cifar.train(SMALL_NET, "synthetic", data_dir=data, run_dir=run_dir, max_steps=steps, **course)


def test_powersgd_trains_alike_on_other_ranks_and_goes_on_on_others(jobs: Jobs, courses: Path) -> None:
    """8 steps on 1 rank and on 2; and 5 on 3 ranks, then the rest on 2."""
    for n in (1, 2):
        jobs(n, "mpirun")
    alone = courses / "alone"
    assert len(runs.losses(alone)) == 8
    for other in (courses / "together", courses / "cut"):
        assert list(runs.losses(other)) == list(runs.losses(alone))
        assert runs.losses(other) == pytest.approx(runs.losses(alone), rel=1e-10)
        assert runs.weights_apart(runs.weights(alone), runs.weights(other)) < 1e-9


def _refused() -> list[str]:
    from hvd_cifar.runtime.world import start

    start()
    import keras

    from hvd_cifar.distributed import DistributedOptimizer

    said = []
    for compression in ("powersgd:0", "powersgd", "powersgd:-1", "bf17", 16):
        try:
            said.append(str(DistributedOptimizer(keras.optimizers.SGD(), compression=compression)))
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_compression_that_does_not_exist_is_refused(jobs: Jobs) -> None:
    (said,) = jobs(1, "mpirun")["refused"]
    for text, given in zip(said, ("'powersgd:0'", "'powersgd'", "'powersgd:-1'", "'bf17'", "16"), strict=True):
        assert given in text and len(text.splitlines()) == 1


def _muon_of_low_rank(data: str, folder: str) -> list[list[Any]]:
    """What is said of nets that train with Muon, and whether their run's folder is there."""
    import hvd_cifar

    told: list[list[Any]] = []
    settings: dict[str, dict[str, Any]] = {"fast": {}, "resnet20": {"global_batch_size": 257}}
    for model, more in settings.items():
        run_dir = Path(folder, model)
        common: dict[str, Any] = {"data_dir": data, "run_dir": run_dir, "compression": "powersgd:2", "max_steps": 1}
        try:
            told.append([model, str(hvd_cifar.train(model, "synthetic", **common, **more)), run_dir.exists()])
        except hvd_cifar.UserError as error:
            told.append([model, f"UserError: {error}", run_dir.exists()])
    return told


def test_muon_refuses_gradients_of_low_rank(jobs: Jobs) -> None:
    """By `fast`, and by a ResNet on a batch that is large enough for it."""
    (told,) = jobs(1, "mpirun")["muon"]
    assert [model for model, _, _ in told] == ["fast", "resnet20"]
    for model, text, is_there in told:
        assert text.startswith("UserError: ") and "\n" not in text
        assert f"powersgd:2: {model} trains this batch with Muon" in text
        assert not is_there
