"""On a real GPU, where `./run.sh setup --gpu` was done: NCCL's sums, the doctor, training.

`./run.sh test tests/launch/test_on_gpu.py`. One GPU is enough: ranks share it. NCCL and this project refuse shared
GPUs. Each rank therefore has its own NCCL_HOSTID, and its own CUDA_VISIBLE_DEVICES, which names GPU 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import runs
from hvd_cifar.runtime.devices import list_gpus
from tests.ranks import CHECKOUT, environment, run_ranks

pytestmark = [
    pytest.mark.skipif(not list_gpus(), reason="needs a GPU: nvidia-smi lists none"),
    pytest.mark.timeout(900),
]
TYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
# Elements of a tensor: kernels copy 16 bytes at a time where addresses allow it, and the rest one by one.
COUNTS = (1, 7, 4096, 1_000_003)


def _share_gpus() -> int:
    """Let NCCL accept ranks that share a GPU; call it before TensorFlow starts. Returns this rank."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    return rank


def _collectives() -> int:
    """Every kind of collective on this rank's GPU, compared with NumPy's results; how many."""
    rank = _share_gpus()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[rank % len(gpus)], "GPU")
    tf.config.experimental.set_memory_growth(gpus[rank % len(gpus)], True)
    hvd.init()
    assert hvd.nccl_built()
    size, checks = hvd.size(), 0

    def right(found: Any, wanted: Any, what: str) -> None:
        nonlocal checks
        assert "GPU" in found.device, f"{what}: on {found.device}"
        close = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-12}.get(found.dtype.name, 0)
        np.testing.assert_allclose(found.numpy().astype("float64"), wanted, rtol=close, atol=close, err_msg=what)
        checks += 1

    def of(owner: int, count: int, kind: str) -> Any:
        return np.random.default_rng((owner, count)).integers(0, 30, count).astype(kind)

    with tf.device("/GPU:0"):
        for kind in TYPES:
            for count in COUNTS:
                own = tf.constant(of(rank, count, kind))
                total = np.sum([of(r, count, "float64") for r in range(size)], axis=0)
                what = f"{kind} [{count}]"
                right(hvd.allreduce(own, op=hvd.Sum), total, f"sum of {what}")
                if "float" in kind:
                    right(hvd.allreduce(own, op=hvd.Average), total / size, f"mean of {what}")
                    scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.25)
                    right(scaled, total / 8, f"scaled sum of {what}")
                for root in range(size):
                    right(hvd.broadcast(own, root), of(root, count, kind), f"broadcast of {what} from {root}")
                blocks = [of(r, count + r, kind) for r in range(size)]
                right(hvd.allgather(tf.constant(blocks[rank])), np.concatenate(blocks), f"all-gather of {what}")
                parts = np.tile(of(rank, count, kind), size)
                gathered = np.concatenate([of(r, count, kind) for r in range(size)])
                right(hvd.alltoall(tf.constant(parts)), gathered, f"all-to-all of {what}")
            own_group = [tf.constant(of(rank, count, kind)) for count in COUNTS]
            options = {"prescale_factor": 0.5} if "float" in kind else {}
            for found, count in zip(hvd.grouped_allreduce(own_group, op=hvd.Sum, **options), COUNTS, strict=True):
                total = np.sum([of(r, count, "float64") for r in range(size)], axis=0)
                right(found, total * options.get("prescale_factor", 1), f"grouped sum of {kind} [{count}]")
    return checks


def _train(folder: str, options: list[str]) -> None:
    """A run on this rank's GPU, which other ranks may share."""
    rank = _share_gpus()
    os.environ["PATH"] = str(Path(sys.executable).parent)  # no nvidia-smi: the variable tells ranks' GPUs apart
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" + ",-1" * rank  # CUDA stops at -1: the same GPU by another name
    from hvd_cifar.cli import main

    words = ["train", "--dataset", "synthetic", "--run-dir", folder, "--log-every", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *options])
    assert ended.value.code == 0
    facts = json.loads((Path(folder) / "config.json").read_text())["run"]
    assert facts["device"] == "/GPU:0", facts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nccl_and_the_kernels_compute_what_numpy_does(ranks: int) -> None:
    each = len(TYPES) * len(COUNTS) * (3 + ranks) + 3 * len(COUNTS) * 2 + len(TYPES) * len(COUNTS)
    assert run_ranks(_collectives, ranks, timeout=300, fresh=True) == [each] * ranks


def test_the_doctor_finds_nothing_wrong_with_the_gpus() -> None:
    words = [sys.executable, "-m", "hvd_cifar.launch", "doctor", "--json"]
    done = subprocess.run(words, cwd=CHECKOUT, env=environment(), capture_output=True, text=True, timeout=600)
    told = json.loads(done.stdout)
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    assert [levels[check] for check in ("GPUs", "job")] == ["ok"] * 2, told["findings"]
    assert "one GPU each" in told["job"]["how"]


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_run_on_a_gpu_has_the_losses_of_one_on_the_cpu(embedded: Path, tmp_path: Path, precision: str) -> None:
    """float32 on a GPU multiplies in TF32, with 10 bits of mantissa."""
    options = ["--data-dir", str(embedded), "--model", "resnet20", "--batch-size", "32", "--max-steps", "5"]
    run_ranks(_train, 1, str(tmp_path / "gpu"), [*options, "--precision", precision], timeout=300, fresh=True)
    words = [sys.executable, "-m", "hvd_cifar", "train", "--dataset", "synthetic", "--log-every", "1", *options]
    words += ["--precision", "float32", "--run-dir", str(tmp_path / "cpu")]
    subprocess.run(words, cwd=CHECKOUT, env=environment({"CUDA_VISIBLE_DEVICES": ""}), check=True, timeout=300)
    on_gpu, on_cpu = (runs.losses(tmp_path / name) for name in ("gpu", "cpu"))
    assert len(on_gpu) == len(on_cpu) == 5
    assert on_gpu != on_cpu and runs.loss_apart(on_gpu, on_cpu, 5) < (0.02 if precision == "float32" else 0.1)


@pytest.mark.parametrize("model", ["tutorial", "resnet20"])
def test_ranks_that_exchange_by_nccl_end_with_the_bits_of_one(embedded: Path, tmp_path: Path, model: str) -> None:
    options = ["--virtual-shards", "2", "--deterministic"]
    one, two = (_trained(ranks, model, embedded, tmp_path / str(ranks), options) for ranks in (1, 2))
    assert runs.summary(one)["weights_sha256"] == runs.summary(two)["weights_sha256"]
    assert runs.losses(one) == runs.losses(two)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_ranks_that_average_by_nccl_learn_what_one_does(embedded: Path, tmp_path: Path, compression: str) -> None:
    """On a CPU they end 0.001 and 0.005 apart, and 1.7 apart from a run on half of each batch."""
    one = _trained(1, "tutorial", embedded, tmp_path / "1", ["--learning-rate", "1"])
    two = _trained(2, "tutorial", embedded, tmp_path / "2", ["--learning-rate", "1", "--compression", compression])
    assert runs.weights_apart(runs.weights(one), runs.weights(two)) < 0.1


def _trained(ranks: int, model: str, data: Path, run_dir: Path, options: list[str]) -> Path:
    words = ["--data-dir", str(data), "--model", model, "--global-batch-size", "26", "--max-steps", "4"]
    run_ranks(_train, ranks, str(run_dir), [*words, *options], timeout=300, fresh=True)
    return run_dir
