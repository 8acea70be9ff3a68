"""Whole runs under a real launcher: alike ranks, checkpoints, evaluation, and every way to fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.options import RESNET8, SMALL, TUTORIAL
from tests.ranks import CHECKOUT, Jobs, command, end_tree, environment, once, run_all

QUICK = ["--log-every", "5", "--eval-every", "0"]

# Options of which only a started run can find that they are wrong, and what is said of them.
WRONG = [
    (("--resume", "/no/such/checkpoint"), "no checkpoint is there"),
    (("--run-dir", "/proc/no"), "--run-dir /proc/no"),
    (("--global-batch-size", "1"), "smaller than 2 ranks"),
    (("--dataset", "cifar10", "--data-url", "http://127.0.0.1:9/x.tar.gz"), "127.0.0.1:9"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of the job of `jobs` are."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "away.py").write_text(AWAY)
    (folder / "no data").mkdir()
    return folder


@pytest.fixture(scope="module")
def jobs(embedded: Path, folder: Path) -> Jobs:
    """What the functions and commands below returned in a job, by their names and by rank: it starts once."""

    def train(name: str, *words: Any, base: tuple[Any, ...] = (*SMALL, embedded)) -> Callable[..., Any]:
        return partial(command, ["train", *base, "--run-dir", folder / name, *words])

    def wrong(name: str, *options: str) -> Callable[..., Any]:
        data = folder / "no data" if "cifar10" in options else embedded
        return train(name, "--max-steps", 1, *options, base=(*SMALL, data))

    of_eight = ("--batch-size", 8, *QUICK)
    diverges = ("--batch-size", 8, "--learning-rate", 1e30, "--set", "warmup_epochs=0", "--checkpoint-every", 1)
    auto = ("--dataset", "auto", "--data-dir", embedded, "--data-url", "http://127.0.0.1:9/x.tar.gz")
    half = ("--precision", "mixed_float16", "--compression", "fp16", "--model", RESNET8)
    evaluate = ("evaluate", "--run-dir", folder / "two", "--output", folder / "evaluation.json")
    promised = ("--max-steps", 12, "--batch-size", 16, "--checkpoint-every", 4)
    resnet = ("--model", RESNET8, "--precision", "mixed_bfloat16", "--max-steps", 6, "--batch-size", 8)
    tutorial = (*TUTORIAL, embedded, *QUICK)
    functions: dict[str, Callable[..., Any]] = {
        "not averaged": partial(_train_without_averaging, str(embedded), str(folder / "not averaged")),
        **{f"wrong {i}": wrong(f"wrong {i}", *options) for i, (options, _) in enumerate(WRONG)},
        "one": train("one", *diverges, "--max-steps", 1),
        "two": train("two", *diverges, "--max-steps", 2),
        "evaluated": partial(command, evaluate),
        "good": train("good", *of_eight, "--max-steps", 5),
        "bad": train("bad", *diverges, "--max-steps", 40, "--checkpoint-every", 7, "--resume", folder / "good"),
        "promised": train("promised", *promised, base=tutorial),
        "kept": partial(_files_of, str(folder / "promised")),
        "again": train("promised", "--config", folder / "promised" / "config.json", base=()),
        "resnet": train("resnet", *resnet, base=tutorial),
        "shortened": partial(_shortened, str(embedded)),
        "auto": train("auto", *half, *of_eight, "--max-steps", 2, base=auto),
        "goes on": train("goes on", *of_eight, "--callbacks", folder / "away.py:Away", "--max-steps", 40),
        "eight ranks": partial(_at_eight_ranks_batch, str(embedded), str(folder)),
    }
    return once(lambda n, launcher: run_all(functions, n, launcher=launcher, timeout=1000))


def _command(n: int, *argv: Any) -> list[str]:
    launcher = ["mpirun", "-q", "-np", str(n), "--bind-to", "none"] if n > 1 else []
    return [*launcher, sys.executable, "-m", "hvd_cifar", *map(str, argv)]


def _run(n: int, *argv: Any, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command on n ranks, to its end."""
    return subprocess.run(
        _command(n, *argv), capture_output=True, text=True, timeout=900, env=environment(env), cwd=CHECKOUT
    )


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _losses(run_dir: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in _events(run_dir) if e["event"] == "train"}


def _files_of(run_dir: str) -> dict[str, str]:
    """The texts of what a run has measured."""
    return {name: (Path(run_dir) / name).read_text() for name in ("summary.json", "metrics.jsonl")}


@pytest.fixture(scope="module")
def answers(jobs: Jobs, folder: Path) -> dict[str, dict[str, Any]]:
    """What 3 ranks answer of the checkpoints that 2 ranks have left, in one start."""
    jobs(2, "mpirun")

    def evaluate(name: str) -> Callable[..., Any]:
        output = folder / f"{name}.json"
        words = ["evaluate", "--run-dir", folder / name, "--output", output]
        return partial(command, words)

    found = run_all({name: evaluate(name) for name in ("promised", "resnet")}, 3)
    assert all(rank["code"] == 0 for ranks in found.values() for rank in ranks), found
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in found}


def test_a_run_leaves_what_it_promises(jobs: Jobs, folder: Path, answers: dict[str, dict[str, Any]]) -> None:
    run_dir = folder / "promised"
    ranks = jobs(2, "mpirun")["promised"]
    assert [rank["code"] for rank in ranks] == [0, 0], ranks
    summary = json.loads((run_dir / "summary.json").read_text())
    promised = (
        "dataset model world_size global_batch_size steps epochs seed precision train_loss test_accuracy test_examples "
        "images_per_second training_seconds weights_sha256 versions"
    )
    assert set(promised.split()) <= set(summary)
    assert (summary["dataset"], summary["model"], summary["world_size"]) == ("synthetic", "tutorial", 2)
    assert {e["dataset"] for e in _events(run_dir)} == {"synthetic"}
    assert (summary["global_batch_size"], summary["steps"], summary["test_examples"]) == (32, 12, 1501)
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert summary["weights_sha256_by_rank"] == [summary["weights_sha256"]] * 2
    assert summary["replicas_identical"] is True
    events = _events(run_dir)
    trained = [("train", 5), ("train", 10), ("train", 12)]
    assert [(e["event"], e["step"]) for e in events] == [*trained, ("eval", 12), ("ranks", 12)]
    assert {"epoch", "loss", "learning_rate", "images_per_second"} <= set(events[0])
    assert {"test_accuracy", "test_loss", "test_examples"} <= set(events[3])
    assert all(len(events[4][name]) == 2 and min(events[4][name]) > 0 for name in ("compute_seconds", "wait_seconds"))
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-12", "step-4", "step-8"]
    assert list((run_dir / "tensorboard").glob("events.*"))
    config = json.loads((run_dir / "config.json").read_text())
    assert config["run"]["world_size"] == 2 and config["learning_rate"] == 0.1

    # The same command again finds nothing to do, and leaves the results alone.
    first, second = jobs(2, "mpirun")["again"]
    assert first["code"] == second["code"] == 0 and "nothing left to do" in "\n".join(first["said"]), first
    assert jobs(2, "mpirun")["kept"] == [_files_of(str(run_dir))] * 2

    # Evaluation from the checkpoint: 3 ranks answer as the run's 2 did. Neither number divides 1501.
    answer = answers["promised"]
    assert answer["test_examples"] == 1501
    assert answer["test_accuracy"] == summary["test_accuracy"]
    assert answer["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)  # float32 sums of other batches


def test_resnet_ranks_agree_and_its_moving_statistics_are_averaged(
    jobs: Jobs, folder: Path, answers: dict[str, dict[str, Any]]
) -> None:
    ranks = jobs(2, "mpirun")["resnet"]
    assert [rank["code"] for rank in ranks] == [0, 0], ranks
    summary = json.loads((folder / "resnet" / "summary.json").read_text())
    assert summary["weights_sha256_by_rank"] == [summary["weights_sha256"]] * 2
    # The checkpoint holds the statistics of all ranks: three answer as two did. bfloat16 rounds other batches
    # otherwise, which may move an example of 2,000 over the edge.
    answer = answers["resnet"]
    assert answer["test_examples"] == summary["test_examples"] == 2000
    assert answer["test_accuracy"] == pytest.approx(summary["test_accuracy"], abs=2e-3)
    assert answer["test_loss"] == pytest.approx(summary["test_loss"], rel=2e-3)


def _train_without_averaging(data: str, run_dir: str) -> dict[str, Any]:
    """`train` as a user calls it, in a program whose optimizer is left as it is."""
    from hvd_cifar.training import assemble

    with mock.patch.object(assemble, "DistributedOptimizer", lambda optimizer, **_: optimizer):
        return command(["train", *SMALL, data, "--run-dir", run_dir, "--max-steps", 2])


def test_a_run_whose_gradients_are_not_averaged_ends_before_its_first_step(jobs: Jobs, folder: Path) -> None:
    first, second = jobs(2, "mpirun")["not averaged"]
    assert first["code"] == second["code"] == 1
    (line,) = first["errors"]
    assert second["errors"] == []  # said once
    assert "gradients are not averaged over the ranks" in line
    assert "rank 0 ended at (-0.5, 0.5), rank 1 ended at (-1, 1)" in line
    assert not (folder / "not averaged").exists()


def test_without_cifar10_and_network_auto_trains_on_the_embedded_set_and_says_so(jobs: Jobs, folder: Path) -> None:
    run_dir = folder / "auto"
    first, second = jobs(2, "mpirun")["auto"]
    assert first["code"] == second["code"] == 0, first
    assert "\n".join(first["errors"] + second["errors"]).count("THIS IS NOT CIFAR-10") == 1
    assert json.loads((run_dir / "summary.json").read_text())["dataset"] == "synthetic"
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["dataset"], config["epochs"]) == ("synthetic", 2)
    accuracies = [line for line in first["said"] if "test accuracy" in line]
    assert accuracies and all("synthetic" in line for line in accuracies)


def _shortened(data: str) -> list[float | None]:
    """Epochs of `fast` on the embedded set, by default and as given."""
    import numpy as np

    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.assemble import prepare
    from hvd_cifar.training.trainer import OfUser

    found = []
    with session() as world:
        for given in ({}, {"epochs": 3}, {"dataset": "synthetic"}):
            options = {"data_dir": data, "data_url": "http://127.0.0.1:9/x.tar.gz", **given}
            settings = prepare(make(TrainSettings, options), world, OfUser()).settings
            found.append(settings.epochs)
        images, labels = np.zeros((9, 32, 32, 3), np.uint8), np.arange(9)
        own = OfUser(dataset=Dataset.from_arrays(images, labels, images, labels, name="synthetic"))
        settings = prepare(make(TrainSettings, {"global_batch_size": 9}), world, own).settings
        found.append(settings.epochs)
    return found


def test_only_the_default_run_on_the_embedded_set_is_shortened(jobs: Jobs) -> None:
    assert jobs(2, "mpirun")["shortened"] == [[0.35, 3, 10, 10]] * 2


def test_real_cifar10_is_learnt_with_the_batch_of_eight_ranks(real_data: Path, tmp_path: Path) -> None:
    """Two ranks with four micro-batches each. With plain SGD at eight times the rate the loss is infinite."""
    run_dir = tmp_path / "run"
    words: list[Any] = ["--model", "tutorial", "--dataset", "cifar10", "--data-dir", real_data, "--run-dir", run_dir]
    words += ["--gradient-accumulation", 4, "--seed", 21, "--max-steps", 65, "--eval-every", 0]
    done = _run(2, "train", *words)
    assert done.returncode == 0, done.stderr
    assert "optimizer muon, learning rate 0.002, times" in done.stdout
    assert done.stdout.count(" of training left") == 1  # at the 20th step: tracing does not count
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["dataset"] == "cifar10" and summary["global_batch_size"] == 1024
    assert summary["test_accuracy"] > 0.3  # a net that does not learn stays at 10%, one fed wrong labels too
    assert "cifar10, tutorial: test accuracy" in done.stdout


def _at_eight_ranks_batch(data: str, folder: str) -> dict[str, dict[str, Any]]:
    """The summaries of default recipes on 1024 examples a step: 25 steps of warm-up, if any, and the full rate after.

    They train on half of the embedded set's images, with a quarter of the pixels, so the warm-up is shorter.
    """
    import hvd_cifar
    from examples.my_net import build
    from hvd_cifar.data import synthetic

    whole = synthetic.LAYOUT.read(synthetic.ensure(Path(data)))
    train, test = ((p.images[:25_600][:, ::2, ::2], p.labels[:25_600]) for p in (whole.train, whole.test))
    dataset = hvd_cifar.Dataset.from_arrays(*train, *test)
    course: dict[str, Any] = {"global_batch_size": 1024, "max_steps": 45, "eval_every": 0}
    return {
        name: hvd_cifar.train(model, dataset, run_dir=f"{folder}/{name}", **course)
        for name, model in (("resnet8", RESNET8), ("default", build))
    }


def test_no_default_recipe_diverges_with_the_batch_of_eight_ranks(jobs: Jobs, folder: Path) -> None:
    """ResNet's, and that of a net without a recipe; the tutorial's is above."""
    found = jobs(2, "mpirun")["eight ranks"][0]
    # A recipe of its own for this batch; eight times the rate for 128.
    for name, rate in (("resnet8", "0.1, times"), ("default", "0.05 to 0.4 over 25 steps")):
        schedule = json.loads((folder / name / "config.json").read_text())["run"]["learning_rate_schedule"]
        assert schedule.startswith(rate)
        assert found[name]["steps"] == 45 and found[name]["train_loss"] < 2.3  # ten classes at random: ln 10


def _wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_divergence_ends_all_ranks_and_keeps_the_last_good_checkpoint(jobs: Jobs, folder: Path) -> None:
    good, bad = (jobs(2, "mpirun")[name] for name in ("good", "bad"))
    assert [rank["code"] for rank in good] == [0, 0] and [rank["code"] for rank in bad] == [1, 1], bad
    errors = [line for rank in bad for line in rank["errors"]]
    message = [line for line in errors if "model diverged with loss = " in line]
    assert len(message) == 1 and re.search(r"loss = (nan|inf) at step \d+", message[0])
    assert not any("Traceback" in line for line in errors)
    assert not list((folder / "bad" / "checkpoints").iterdir())
    assert not (folder / "bad" / "summary.json").exists()
    assert [path.name for path in (folder / "good" / "checkpoints").iterdir()] == ["step-5"]


def test_a_net_that_has_diverged_is_not_saved_at_the_end_and_not_evaluated(jobs: Jobs, folder: Path) -> None:
    """The loss of the only step is that of the weights before it. The weights after it are finite.

    So only the evaluation finds that the net has diverged.
    """
    found = jobs(2, "mpirun")
    assert [rank["code"] for rank in found["one"]] == [1, 1], found["one"]
    said = "\n".join(found["one"][0]["errors"])
    assert re.search(r"diverged with test loss = (nan|inf) at step 1; nothing was saved", said)
    assert not list((folder / "one" / "checkpoints").iterdir())

    assert [p.name for p in (folder / "two" / "checkpoints").iterdir()] == ["step-1"]
    evaluated = found["evaluated"]
    assert [rank["code"] for rank in evaluated] == [1, 1], evaluated
    assert not any("step 1:" in line for rank in evaluated for line in rank["said"])
    said = "\n".join(evaluated[0]["errors"])
    assert re.search(r"test loss = (nan|inf): the run had diverged at .*step-1;", said)
    assert not (folder / "evaluation.json").exists()


@pytest.mark.parametrize("gone", ["run", "run/metrics.jsonl"])
def test_files_that_are_removed_during_a_run_end_it_with_what_can_be_saved(
    gone: str, embedded: Path, tmp_path: Path
) -> None:
    base = [*SMALL, embedded, "--run-dir", tmp_path / "run", "--batch-size", 8, *QUICK]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(_command(2, "train", *base), **pipes, env=environment(), cwd=CHECKOUT)
    try:
        _wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and _losses(tmp_path / "run"))
        (tmp_path / gone).rename(tmp_path / "gone")
        _, err = job.communicate(timeout=120)
    finally:
        end_tree(job)
    assert job.returncode == 2
    (line,) = (line for line in err.splitlines() if line.startswith("hvd_cifar: "))
    assert "Traceback" not in err and "No such file or directory" in line
    if gone == "run":
        assert "cannot write the checkpoint" in line and "nothing is saved" in line
    else:
        (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
        assert f"cannot write {tmp_path / gone}" in line and f"the checkpoint {saved.name} is kept" in line


AWAY = """
import hvd_cifar

class Away(hvd_cifar.Callback):
    def _move(self, run, step, one, other):
        if run.step == step and run.world.is_root:
            (run.run_dir / one).rename(run.run_dir / other)

    def on_step(self, run):
        self._move(run, 7, 'metrics.jsonl', 'away')

    def on_log(self, run):
        self._move(run, 10, 'away', 'metrics.jsonl')
"""


def test_a_run_goes_on_after_a_write_that_failed_once(jobs: Jobs, folder: Path) -> None:
    """metrics.jsonl is missing when step 10 is logged. All ranks save at the same step, and nothing is lost."""
    run_dir = folder / "goes on"
    ranks = jobs(2, "mpirun")["goes on"]
    assert [rank["code"] for rank in ranks] == [0, 0], ranks
    assert sorted(_losses(run_dir)) == list(range(5, 41, 5))
    first, last = sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())
    assert 10 < first < last == 40
    said = "\n".join(line for rank in ranks for line in rank["errors"])
    assert said.count("could not be written for a while; nothing of it is lost") == 1


@pytest.mark.parametrize("case", range(len(WRONG)), ids=[option for (option, *_), _ in WRONG])
def test_what_only_a_started_run_can_find_wrong_is_one_line_too(case: int, jobs: Jobs) -> None:
    first, second = jobs(2, "mpirun")[f"wrong {case}"]
    assert first["code"] == second["code"] == 2, first
    (line,) = first["errors"]
    assert WRONG[case][1] in line and second["errors"] == []
    assert not any("step" in line for rank in (first, second) for line in rank["said"])


def test_a_wrong_option_ends_a_job_with_one_line(embedded: Path, tmp_path: Path) -> None:
    """Found before the ranks have started."""
    done = _run(2, "train", *SMALL, embedded, "--run-dir", tmp_path / "run", "--max-steps", 1, "--batch-size", 0)
    assert done.returncode == 2, done.stderr
    assert "--batch-size 0" in done.stderr and len(done.stderr.splitlines()) == 1
    assert "step" not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_in_the_middle_of_a_run_is_one_line_and_ends_all_ranks(embedded: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no file system can be mounted here")
    base = [*SMALL, embedded, "--run-dir", disk / "run", "--batch-size", 8, *QUICK]
    job = subprocess.Popen(
        _command(2, "train", *base),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=CHECKOUT,
    )
    try:
        _wait_for(lambda: (disk / "run" / "metrics.jsonl").exists() and _losses(disk / "run"))
        with contextlib.suppress(OSError), (disk / "filler").open("wb") as filler:
            filler.write(b"0" * 2**20)
        _, err = job.communicate(timeout=120)
        lines = [line for line in err.splitlines() if line.startswith("hvd_cifar: ")]
        assert len(lines) == 1 and re.search("cannot write .*No space left on device", lines[0]), err
        assert "Traceback" not in err
        assert job.returncode == 2
    finally:
        end_tree(job)
        subprocess.run(["umount", "-l", disk], check=True)
