"""What was trained is used: exported, loaded by TensorFlow alone, compared with `evaluate`, asked for images.

Two ranks train each net for a few steps, and evaluate it. One process exports them all. Another one, which cannot
import this project, Horovod and Pillow, loads them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.options import OF_ANY_SIZE
from tests.ranks import CHECKOUT, environment, run_command, run_ranks

NETS = ("six", "own")  # what an export must hold: six views of a test image, and a recipe of the user's own
# The example's net, whose recipe of larger batches, which trains it, shows the net other images.
OWN = f"""
import sys
from dataclasses import replace
sys.path.append("{CHECKOUT}/examples")
import my_net

def build(image_shape, classes):
    net, recipe = my_net.build_with_recipe(image_shape, classes)
    return net, replace(recipe, augmentation="tutorial", beyond=(31, recipe))
"""
Used = tuple[Path, dict[str, Any]]  # the folder, and the evaluations by net
NAMES = ["heron", "stork", "ibis", "crane"]
DATA = f"""
import numpy as np
import hvd_cifar

def load():
    generator = np.random.default_rng(9)
    images = generator.integers(0, 256, (211, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 4, 211)
    parts = images[:128], labels[:128], images[128:], labels[128:]
    return hvd_cifar.Dataset.from_arrays(*parts, class_names={NAMES})
"""
LOAD = """
import sys
sys.modules.update(dict.fromkeys(("horovod", "mpi4py", "hvd_cifar", "PIL")))
import numpy as np, tensorflow as tf
images, other = np.load("images.npy"), np.zeros((2, 50, 70, 3), np.uint8)
for name in sys.argv[1:]:
    saved = tf.saved_model.load(f"exported/{name}/saved_model").signatures["serving_default"]
    found = {part: value.numpy() for part, value in saved(images=tf.constant(images)).items()}
    found["class_names"] = found["class_names"].astype(bytes)
    assert saved(images=tf.constant(other))["logits"].shape == (2, 4)
    graph = saved.graph.as_graph_def()
    nodes = [node for part in (graph.node, *(f.node_def for f in graph.library.function)) for node in part]
    assert not [node for node in nodes if "Xla" in str(node.attr) or "Py" in node.op]
    np.savez(f"{name}.npz", **found)
"""


def _train(folder: str) -> dict[str, Any]:
    """Runs of a few steps in `folder`, and their evaluations on this job's ranks."""
    import hvd_cifar

    common: dict[str, Any] = {"dataset": f"{folder}/data.py:load", "global_batch_size": 32, "max_steps": 3}
    common |= {"precision": "float32", "eval_every": 0, "set": {"learning_rate_factor": 0.1}}
    files = {"six": OF_ANY_SIZE, "own": f"{folder}/own.py:build"}
    found = {}
    for name, model in files.items():
        run_dir = Path(folder, name)
        trained = hvd_cifar.train(model, run_dir=run_dir, **common)
        output = run_dir / "evaluation" / "result.json"
        output.parent.mkdir(exist_ok=True)
        found[name] = hvd_cifar.evaluate(run_dir, output=output)
        found[name]["in_training"] = trained["test_loss"]
    return found


def _export(folder: str) -> None:
    """Export each run, and write the logits of `evaluate` for the test images beside it."""
    import tensorflow as tf

    from hvd_cifar import config
    from hvd_cifar.tools.export import export
    from hvd_cifar.tools.settings import ExportSettings
    from hvd_cifar.training.evaluate import logits_of
    from hvd_cifar.training.trained import load

    images = np.load(f"{folder}/images.npy")
    for name in NETS:
        trained = load(config.make(config.RunSettings, {"run_dir": f"{folder}/{name}"}))
        seen = tf.constant(trained.transforms.test(images))
        logits = logits_of(trained.model, seen, trained.six_views)
        np.save(f"{folder}/{name}.npy", logits.numpy())
        export(config.make(ExportSettings, {"run_dir": f"{folder}/{name}", "to": f"{folder}/exported/{name}"}))
        values = trained.model.get_weights()
        for variable in trained.model.weights:
            variable.assign(tf.zeros_like(variable.value))
        trained.model.load_weights(f"{folder}/exported/{name}/model.weights.h5")
        assert all(map(np.array_equal, trained.model.get_weights(), values))


def _softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    """A folder with runs, exports, and what TensorFlow alone makes of them; and the evaluations, by net."""
    folder = tmp_path_factory.mktemp("use")
    (folder / "data.py").write_text(DATA)
    (folder / "own.py").write_text(OWN)
    made: dict[str, Any] = {}
    exec(DATA, made)
    test = made["load"]().test
    np.save(folder / "images.npy", test.images)
    np.save(folder / "labels.npy", test.labels)
    evaluations = run_ranks(_train, 2, str(folder), timeout=900)[0]
    (folder / "data.py").unlink()  # nothing needs the data from here on
    place = folder / "exported" / "six"  # an empty folder of the user's own
    place.mkdir(parents=True)
    run_ranks(_export, 1, str(folder), timeout=200)
    assert sorted(path.name for path in place.iterdir()) == ["metadata.json", "model.weights.h5", "saved_model"]
    (program,) = re.findall(r"^```python\n(import numpy.*?)^```", (CHECKOUT / "docs/use.md").read_text(), re.M | re.S)
    program = LOAD + program.replace("exported/", "exported/six/")
    words = [sys.executable, "-I", "-c", program, *NETS]
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\['\w+', '\w+'\]$", done.stdout, re.M), done.stdout  # what the page's program prints
    return folder, evaluations


def test_tensorflow_alone_gives_the_logits_of_evaluate(used: Used) -> None:
    folder, evaluations = used
    labels = np.load(folder / "labels.npy")
    for name, found in evaluations.items():
        expected = np.load(folder / f"{name}.npy")
        entropy = -np.log(_softmax(expected.astype(np.float64))[np.arange(len(labels)), labels])
        assert found["test_loss"] == pytest.approx(entropy.mean(), abs=1e-6)  # these are the logits that `evaluate` has
        assert found["in_training"] == pytest.approx(found["test_loss"], abs=1e-6)
        with np.load(folder / f"{name}.npz") as made:
            assert np.abs(made["logits"] - expected).max() < 1e-5
            assert made["probabilities"] == pytest.approx(_softmax(expected), abs=1e-6)
            assert made["class_names"].astype(str).tolist() == [NAMES] * len(labels)
        about = json.loads((folder / "exported" / name / "metadata.json").read_text())
        config = json.loads((folder / name / "config.json").read_text())
        assert about["class_names"] == NAMES
        assert (about["step"], about["checkpoint"], about["run"]) == (3, "step-3", str(folder / name))
        assert about["test_accuracy"] == found["test_accuracy"] and about["test_views"] == (6 if name == "six" else 1)
        assert about["examples_sha256"] == config["run"]["examples_sha256"]
    assert sorted(path.name for path in (folder / "exported").iterdir()) == sorted(evaluations)


def test_the_confusion_is_that_of_all_ranks(used: Used) -> None:
    """83 test images on two ranks."""
    folder, evaluations = used
    labels = np.load(folder / "labels.npy")
    for name, evaluation in evaluations.items():
        found = json.loads((folder / name / "confusion.json").read_text())
        logits = np.load(folder / f"{name}.npy").astype(np.float64)
        predicted, losses = logits.argmax(axis=-1), -np.log(_softmax(logits)[np.arange(len(labels)), labels])
        expected = np.zeros((4, 4), int)
        np.add.at(expected, (labels, predicted), 1)
        assert found["matrix"] == expected.tolist()
        assert np.trace(expected) == round(evaluation["test_accuracy"] * len(labels))
        worst = [int(i) for i in np.argsort(-np.where(predicted == labels, -1, losses), kind="stable")[:16]]
        assert [mistake["index"] for mistake in found["mistakes"]] == worst


def test_predict_names_classes_and_passes_over_broken_images(used: Used, tmp_path: Path) -> None:
    folder, _ = used
    name = "own"
    images, expected = np.load(folder / "images.npy")[:3], _softmax(np.load(folder / f"{name}.npy")[:2])
    (tmp_path / "b" / "c").mkdir(parents=True)
    for place, image in zip(("b/0.png", "b/c/1.bmp"), images[:2], strict=True):
        Image.fromarray(image).save(tmp_path / place)
    large = Image.fromarray(images[2]).resize((96, 64), Image.Resampling.NEAREST).convert("RGBA")
    large.save(tmp_path / "large.webp", lossless=True)
    (tmp_path / "b" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    for text in ("b/notes.txt", "b/.hidden.png", "two\nlines.png"):
        (tmp_path / text).write_text("no image")
    given = [tmp_path / one for one in ("b", "large.webp", "none.png", "large.webp", "two\nlines.png")]
    (done,) = run_command(1, "predict", folder / name, *given, "--json", code=2)
    told = [re.findall(r"^hvd_cifar: cannot read the image (.+?) \(.+\): ", line) for line in done["errors"]]
    assert told == [[f"{tmp_path}/{place}"] for place in ("b/broken.jpg", "none.png", r"two\nlines.png")]
    found = [json.loads(line) for line in done["said"]]
    several = ["b/0.png", "b/c/1.bmp", "large.webp", "large.webp"]
    assert [line["image"] for line in found] == [f"{tmp_path}/{place}" for place in several]
    for line, row in zip(found, expected, strict=False):
        chances = [part["probability"] for part in line["classes"]]
        assert chances == sorted(chances, reverse=True)
        by_name = {part["class"]: part["probability"] for part in line["classes"]}
        assert [by_name[name] for name in NAMES] == pytest.approx(row.tolist(), abs=1e-5)


def test_an_export_takes_the_place_of_nothing(used: Used, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (done,) = run_command(1, "export", used[0] / "own", "--to", tmp_path / "full", code=2)
    (line,) = done["errors"]
    assert "full: exists; give an empty folder" in line
