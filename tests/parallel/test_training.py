"""Whole runs under a real launcher: alike ranks, files, curves, evaluation, and every way to fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from benchmarks import runs
from tests.options import FEW, SMALL_NET
from tests.ranks import command, run_command, run_ranks
from tests.small import EXAMPLES

BASE = ("--model", SMALL_NET, "--dataset", FEW)
QUICK = ("--batch-size", 8, "--log-every", 5, "--eval-every", 0)
DIVERGES = ("--batch-size", 8, "--learning-rate", 1e30, "--set", "warmup_epochs=0")

# Options of which only a started run can find that they are wrong, and what is said of them.
WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("--resume", "no/such/checkpoint"), "no checkpoint is there"),
    (("--run-dir", "/proc/no"), "--run-dir /proc/no"),
    (("--global-batch-size", 1), "smaller than 2 ranks"),
    (("--dataset", "cifar10"), "cannot download CIFAR-10 from https://www.cs.toronto.edu"),
]


def _train(run_dir: Path, *words: Any, base: tuple[Any, ...] = BASE, code: int = 0) -> list[dict[str, Any]]:
    """A run on two ranks to its end."""
    return run_command(2, "train", *base, "--run-dir", run_dir, *words, code=code)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run of 12 steps: do not write there."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    words = ("--max-steps", 12, "--batch-size", 16, "--checkpoint-every", 4, "--log-every", 5, "--eval-every", 0)
    _train(run_dir, *words, base=("--model", "tutorial", "--dataset", FEW))
    return run_dir


def test_a_run_leaves_what_it_promises(whole: Path, tmp_path: Path) -> None:
    summary, events = runs.summary(whole), runs.events(whole)
    promised = (
        "dataset model world_size global_batch_size steps epochs seed precision train_loss test_accuracy test_examples "
        "images_per_second training_seconds weights_sha256 versions"
    )
    assert set(promised.split()) <= set(summary)
    assert (summary["dataset"], summary["model"], summary["world_size"]) == ("small.py:few", "tutorial", 2)
    assert {e["dataset"] for e in events} == {"small.py:few"}
    assert (summary["global_batch_size"], summary["steps"], summary["test_examples"]) == (32, 12, EXAMPLES)
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert summary["weights_sha256_by_rank"] == [summary["weights_sha256"]] * 2
    assert summary["replicas_identical"] is True
    trained = [("train", 5), ("train", 10), ("train", 12)]
    assert [(e["event"], e["step"]) for e in events] == [*trained, ("eval", 12), ("ranks", 12)]
    assert {"epoch", "loss", "learning_rate", "images_per_second"} <= set(events[0])
    assert {"test_accuracy", "test_loss", "test_examples"} <= set(events[3])
    assert all(len(events[4][name]) == 2 and min(events[4][name]) > 0 for name in ("compute_seconds", "wait_seconds"))
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step-12", "step-4", "step-8"]
    config = json.loads((whole / "config.json").read_text())
    assert config["run"]["world_size"] == 2 and config["learning_rate"] == 0.1

    # Evaluation from the checkpoint: 3 ranks answer as the run's 2 did. Neither number divides that of the examples.
    run_command(3, "evaluate", "--run-dir", whole, "--output", tmp_path / "evaluation.json")
    answer = json.loads((tmp_path / "evaluation.json").read_text())
    assert answer["test_examples"] == EXAMPLES
    assert answer["test_accuracy"] == summary["test_accuracy"]
    assert answer["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)  # float32 sums of other batches


def test_tensorboard_shows_what_the_run_records(whole: Path) -> None:
    events, found = runs.events(whole), EventAccumulator(str(whole / "tensorboard")).Reload()

    def curve(tag: str) -> dict[int, float]:
        return {event.step: make_ndarray(event.tensor_proto).item() for event in found.Tensors(tag)}

    def recorded(kind: str, name: str) -> Any:
        return pytest.approx({e["step"]: e[name] for e in events if e["event"] == kind}, rel=1e-5)

    total, weights, entropies = curve("total_loss"), curve("weight_loss"), curve("cross_entropy")
    assert total == recorded("train", "loss") and all(weights.values())
    assert total == pytest.approx({step: entropies[step] + weights[step] for step in (5, 10, 12)}, rel=1e-5)
    for name in ("learning_rate", "images_per_second"):
        assert curve(name) == recorded("train", name)
    assert curve("small.py:few/test_accuracy") == recorded("eval", "test_accuracy")
    (times,) = (event for event in events if event["event"] == "ranks")
    for name in ("compute_seconds", "wait_seconds"):
        assert [curve(f"{name}/rank_{rank}")[12] for rank in (0, 1)] == pytest.approx(times[name], rel=1e-5)


def test_the_same_command_again_finds_nothing_to_do_and_leaves_the_results_alone(whole: Path) -> None:
    files = [whole / name for name in ("summary.json", "metrics.jsonl")]
    texts, written = [file.read_text() for file in files], files[0].stat().st_mtime_ns
    first, _ = _train(whole, "--config", whole / "config.json", base=())
    assert "nothing left to do" in "\n".join(first["said"]), first
    assert [file.read_text() for file in files] == texts
    assert files[0].stat().st_mtime_ns > written  # what the launcher takes for this start's success


def _train_without_averaging(run_dir: str) -> dict[str, Any]:
    """`train` as a user calls it, in a program whose optimizer is left as it is."""
    from hvd_cifar.training import work

    with mock.patch.object(work, "DistributedOptimizer", lambda optimizer, **_: optimizer):
        return command(["train", *BASE, "--run-dir", run_dir, "--max-steps", 2])


def test_a_run_whose_gradients_are_not_averaged_ends_before_its_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(_train_without_averaging, 2, str(tmp_path / "run"))
    assert first["code"] == second["code"] == 1
    (line,) = first["errors"]
    assert second["errors"] == []  # said once
    assert "gradients are not averaged over the ranks" in line
    assert "is not distributed; wrap the optimizer in" in line
    assert not (tmp_path / "run").exists()


def test_without_cifar10_and_network_auto_trains_on_the_embedded_set(embedded: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    base = ("--dataset", "auto", "--data-dir", embedded, "--model", SMALL_NET)
    half = ("--precision", "mixed_float16", "--compression", "fp16")
    first, second = _train(run_dir, *QUICK, *half, "--max-steps", 2, base=base)
    assert "\n".join(first["errors"] + second["errors"]).count("THIS IS NOT CIFAR-10") == 1
    assert runs.summary(run_dir)["dataset"] == "synthetic"
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["dataset"], config["epochs"]) == ("synthetic", 2)
    accuracies = [line for line in first["said"] if "test accuracy" in line]
    assert accuracies and all("synthetic" in line for line in accuracies)


@pytest.mark.slow
def test_real_cifar10_is_learnt_with_the_batch_of_eight_ranks(real_data: Path, tmp_path: Path) -> None:
    """Two ranks with four micro-batches each. With plain SGD at eight times the rate the loss is infinite."""
    run_dir = tmp_path / "run"
    words: list[Any] = ["--model", "tutorial", "--dataset", "cifar10", "--data-dir", real_data, "--run-dir", run_dir]
    words += ["--gradient-accumulation", 4, "--seed", 21, "--max-steps", 65, "--eval-every", 0]
    first, _ = run_command(2, "train", *words, timeout=900, fresh=True)
    said = "\n".join(first["said"])
    assert "optimizer muon, learning rate 0.002, times" in said
    summary = runs.summary(run_dir)
    assert summary["dataset"] == "cifar10" and summary["global_batch_size"] == 1024
    assert summary["test_accuracy"] > 0.3  # a net that does not learn stays at 10%, one fed wrong labels too
    assert "cifar10, tutorial: test accuracy" in said


@pytest.mark.parametrize(("steps", "what"), [(40, "loss"), (1, "test loss")])
def test_a_net_that_has_diverged_ends_all_ranks_and_is_not_saved(steps: int, what: str, tmp_path: Path) -> None:
    """The loss of a run's only step is that of the weights before it: the evaluation finds what came after it."""
    ranks = _train(tmp_path / "run", *DIVERGES, "--max-steps", steps, "--checkpoint-every", 7, code=1)
    errors = [line for rank in ranks for line in rank["errors"]]
    (line,) = (line for line in errors if "diverged" in line)
    assert re.search(rf"model diverged with {what} = (nan|inf) at step \d+; nothing was saved", line), line
    assert not any("Traceback" in line for line in errors)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert not (tmp_path / "run" / "summary.json").exists()


# After step 7 it moves a file of the run away, and back after step 10 is logged, where the run goes on.
AWAY = """
import hvd_cifar

class Away(hvd_cifar.Callback):
    def _move(self, run, step, one, other):
        if run.step == step and run.world.is_root:
            (run.run_dir / one).rename(run.run_dir / other)

    def on_step(self, run):
        self._move(run, 7, "metrics.jsonl", "away")

    def on_log(self, run):
        self._move(run, 10, "away", "metrics.jsonl")
"""


@pytest.mark.parametrize("back", [True, False])
def test_a_file_that_is_removed_during_a_run_ends_it_with_a_checkpoint(back: bool, tmp_path: Path) -> None:
    """Where the file is back at the next step, nothing is lost: all ranks save at the same step, and go on."""
    run_dir, cut = tmp_path / "run", None if back else AWAY.index("    def on_log")
    (tmp_path / "away.py").write_text(AWAY[:cut])
    words = (*QUICK, "--callbacks", f"{tmp_path}/away.py:Away", "--max-steps", 40)
    ranks = _train(run_dir, *words, code=0 if back else 2)
    lines = [line for rank in ranks for line in rank["errors"] if line.startswith("hvd_cifar: ")]
    if back:
        assert sorted(runs.losses(run_dir)) == list(range(5, 41, 5))
        first, last = sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())
        assert 10 < first < last == 40
        assert "\n".join(lines).count("could not be written for a while; nothing of it is lost") == 1
        return
    (line,) = lines
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert f"cannot write {run_dir}/metrics.jsonl: No such file or directory" in line
    assert f"the checkpoint {saved.name} is kept" in line


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[option for (option, *_), _ in WRONG])
def test_what_only_a_started_run_can_find_wrong_is_one_line_too(
    options: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    first, second = _train(tmp_path / "run", "--max-steps", 1, "--data-dir", tmp_path, *options, code=2)
    (line,) = first["errors"]
    assert message in line and second["errors"] == []
    assert not any("step" in line for rank in (first, second) for line in rank["said"])
