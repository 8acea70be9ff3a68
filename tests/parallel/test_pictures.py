"""A folder of pictures, from its files to a prediction, by the examples of nets for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import pictures
from tests.ranks import CHECKOUT, environment, run_ranks

pytestmark = pytest.mark.slow
COUNT = 3 * len(pictures.CLASSES) * len(pictures.KINDS)
EXAMPLES = CHECKOUT / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "shapes"
    pictures.fill(path, COUNT)
    return path


def _launch(*words: Any, cwd: Path, **variables: str) -> str:
    env = environment({"PYTHONPATH": str(CHECKOUT), "HOME": str(cwd), **variables})
    command = [sys.executable, "-m", "hvd_cifar.launch", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_examples_of_nets_train_predict_and_export(folder: Path, tmp_path: Path) -> None:
    data = ["--dataset", f"folder:{folder}", "--image-size", 96, "--batch-size", 8]
    words = ["-np", 2, "train", "--model", f"{EXAMPLES}/mobilenet.py:build", *data, "--sync-batch-norm"]
    said = _launch(*words, "--max-steps", 4, "--run-dir", "run", cwd=tmp_path)
    assert "are the test set" in said and "start-up proof" in said
    _launch("report", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    shown = _launch("predict", "run", folder / "disc" / "00000.jpg", folder / "square", "--json", cwd=tmp_path)
    lines = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert len(lines) == 1 + COUNT // 4
    _launch("export", "run", "--to", "exported", cwd=tmp_path)
    import keras
    import tensorflow as tf

    from hvd_cifar.data.pictures import decode

    exported = tf.saved_model.load(str(tmp_path / "exported" / "saved_model"))
    plain = next(line for line in lines if line["image"].endswith("palette.png") or line["image"].endswith(".gif"))
    found = exported.serve(decode(Path(plain["image"]), 3)[None])["probabilities"].numpy()[0]
    told = {part["class"]: part["probability"] for part in plain["classes"]}
    assert [told[name] for name in sorted(told)] == pytest.approx(found.tolist(), abs=0.02)

    body = keras.applications.MobileNetV2((96, 96, 3), alpha=0.5, weights=None, include_top=False, pooling="avg")
    body.save_weights(tmp_path / "body.weights.h5")
    words = ["-np", 2, "train", "--model", f"{EXAMPLES}/fine_tune.py:build", *data, "--max-steps", 4]
    _launch(*words, "--run-dir", "fine", cwd=tmp_path, HVD_CIFAR_WEIGHTS="body.weights.h5")
    settings = {"run_dir": str(tmp_path / "fine")}
    run_ranks(_is_frozen, 1, settings, str(tmp_path / "body.weights.h5"), launcher="", timeout=200)
    _launch("predict", "fine", folder / "disc" / "00000.jpg", cwd=tmp_path)


def _is_frozen(settings: dict[str, str], weights: str) -> None:
    import keras

    from hvd_cifar.config import RunSettings, make
    from hvd_cifar.training.trained import load

    model = load(make(RunSettings, settings)).model
    body = keras.applications.MobileNetV2((96, 96, 3), alpha=0.5, weights=None, include_top=False, pooling="avg")
    body.load_weights(weights)
    theirs = {v.path: v for v in model.variables}
    assert all(np.array_equal(v.numpy(), theirs[v.path].numpy()) for v in body.variables)
    assert {v.path for v in model.trainable_variables} == {"head/kernel", "head/bias"}


def test_records_are_read_by_index(tmp_path: Path) -> None:
    import tensorflow as tf

    for name, count in (("train", 24), ("test", 8)):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as file:
            for number in range(count):
                image = tf.io.encode_png(np.full((70, 90, 3), 10 * number, np.uint8)).numpy()
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 3])),
                }
                file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    variables = {"HVD_CIFAR_TRAIN": str(tmp_path / "train"), "HVD_CIFAR_TEST": str(tmp_path / "test")}
    words = ["-np", 2, "train", "--model", f"{EXAMPLES}/my_net.py:build", "--dataset", f"{EXAMPLES}/my_records.py:load"]
    said = _launch(*words, "--global-batch-size", 8, "--max-steps", 4, "--run-dir", "run", cwd=tmp_path, **variables)
    assert " on records: " in said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["run"]["data"]["channel_mean"] == pytest.approx([115] * 3)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_examples"] == 8
