"""What TensorBoard shows of real runs on two ranks, beside NumPy's numbers; and that training does not notice."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS, EVERY, RATE, DECAY = 11, 5, 0.01, 0.004
PLAIN = {"deterministic": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {**PLAIN, "summary_every": EVERY},
    "none": {**PLAIN, "summary_every": 0},
    "half": {**PLAIN, "max_steps": 4, "eval_every": 3, "precision": "mixed_float16", "compression": "fp16"},
}


def _train(data: str, folder: str) -> dict[str, Any]:
    """Runs in one start of the ranks: their digests; of the first what a callback sees at step 5."""
    from hvd_cifar import Callback
    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.train import assemble
    from hvd_cifar.training.work import UserObjects

    seen: dict[str, Any] = {}

    class Look(Callback):
        """Weights before and after a step, and its images."""

        def on_step(self, run: Any) -> None:
            weights = {v.path: v.numpy() for v in run.model.trainable_variables}
            if run.step == EVERY - 1:
                self.before = weights
            if run.step == EVERY and not seen:
                batch = run.progress.micro_batches[0]
                seen.update(image=batch.image.numpy(), label=batch.label.numpy(), before=self.before, after=weights)

    common = {
        "model": "tutorial",
        "dataset": "synthetic",
        "data_dir": data,
        "seed": 3,
        "batch_size": 40,
        "log_every": 1,
    }
    common |= {"eval_every": 0, "max_steps": STEPS, "learning_rate": RATE}
    common["set"] = {"warmup_epochs": 0, "learning_rate_factor": 1}
    digests = {}
    with session(1, deterministic=True) as world:
        for name, way in WAYS.items():
            settings = make(TrainSettings, {**common, "run_dir": f"{folder}/{name}", **way})
            trainer = assemble(settings, world, UserObjects(callbacks=[Look()]))
            digests[name] = trainer.train()["weights_sha256"]
    return {"digests": digests, "seen": seen, "names": trainer.run.data.class_names}


class Board:
    """The event files of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
        self.tags = set(self.events.Tags()["tensors"])

    def __getitem__(self, tag: str) -> dict[int, Any]:
        """Values by step; those of a curve are numbers."""
        values = {event.step: make_ndarray(event.tensor_proto) for event in self.events.Tensors(tag)}
        return {step: value if value.ndim else value.item() for step, value in values.items()}


def _metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def _buckets(values: Any) -> Any:
    counts, edges = np.histogram(np.array(values, np.float32).astype(np.float64), 30)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


@pytest.mark.timeout(1600)
def test_tensorboard_shows_what_the_run_computes(embedded: Path, tmp_path: Path) -> None:
    ranks = run_ranks(_train, 2, str(embedded), str(tmp_path), timeout=1500, fresh=True)
    _, seen = (rank["seen"] for rank in ranks)
    digests = ranks[0]["digests"]
    run, board = tmp_path / "plain", Board(tmp_path / "plain")

    # Training does not notice.
    assert digests["plain"] == digests["none"]
    # The losses of each step.
    trained = _metrics(run, "train")
    raw = board["total_loss"]
    assert {event["step"]: event["loss"] for event in trained} == pytest.approx(raw) and len(raw) == STEPS
    decay = DECAY / 2 * sum(np.square(seen["before"][f"local{i}/kernel"]).sum() for i in (3, 4))
    assert board["weight_loss"][EVERY] == pytest.approx(decay, rel=1e-5)
    assert raw[EVERY] == pytest.approx(board["cross_entropy"][EVERY] + decay, rel=1e-5)
    for name in ("learning_rate", "images_per_second"):
        assert board[name] == pytest.approx({event["step"]: event[name] for event in trained}, rel=1e-5)

    # Histograms of the variables, and of the gradient that the optimizer applied: the mean over both ranks.
    summaries = [1, EVERY, 2 * EVERY]
    for path, after in seen["after"].items():
        layer, _, name = path.partition("/")
        tag = f"{layer}/{ {'kernel': 'weights', 'bias': 'biases'}[name] }"
        assert list(board[tag]) == list(board[f"{tag}/gradients"]) == summaries
        assert np.array_equal(board[tag][EVERY], _buckets(after))
        gradient = (np.array(seen["before"][path]) - np.array(after)) / RATE
        found = board[f"{tag}/gradients"][EVERY]
        assert found[:, 2].sum() == gradient.size
        ends = found[0, 0], found[-1, 1]
        # What float32 weights near 0.1 lose of a small change.
        assert ends == pytest.approx((gradient.min(), gradient.max()), abs=2e-6 / RATE, rel=1e-3)
        assert max(map(abs, ends)) > 1e-4

    # An image of each class of rank 0's batch, as the net got it.
    own = ranks[0]["seen"]
    shown = {tag for tag in board.tags if tag.startswith("images/") and EVERY in board[tag]}
    names = [ranks[0]["names"][label] for label in own["label"]]
    assert shown == {f"images/{name}" for name in names}
    for name in set(names):
        image = np.array(own["image"][names.index(name)])
        pixels = np.asarray(Image.open(io.BytesIO(board[f"images/{name}"][EVERY][2])))
        assert np.abs(pixels / 255 - (image - image.min()) / np.ptp(image)).max() < 0.51 / 255

    # The evaluation, the ranks' times, the graph.
    (evaluation,) = _metrics(run, "eval")
    assert board["synthetic/test_accuracy"][STEPS] == pytest.approx(evaluation["test_accuracy"])
    (times,) = _metrics(run, "ranks")
    for name in ("step_seconds", "compute_seconds", "wait_seconds"):
        for rank in (0, 1):
            assert board[f"{name}/rank_{rank}"][STEPS] == pytest.approx(times[name][rank])
            assert times["step_seconds"][rank] > 0.9 * times[name][rank]
    assert any("Horovod" in node.op for node in board.events.Graph().node)

    # The gradient is unscaled; by default a summary follows the first step and each evaluation.
    half = Board(tmp_path / "half")["local3/weights/gradients"]
    assert list(half) == [1, 3] and 0 < half[1][-1, 1] < 1  # unscaled: the loss scale is 32,768
