"""A run and the files of the user that it was started with: edited between starts, within a job, and after its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import runs
from tests.ranks import command, run_ranks

NET = """
import keras, {helper}
def build(shape, c):
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, {helper}.ACTIVATION, name="hidden"), keras.layers.Dense(c)]
    return keras.Sequential([keras.Input(shape), *layers])
"""
DATA = """
import os, numpy as np, hvd_cifar
def load():
    labels = (np.arange(64) + int(os.environ.get("SHIFT", "0"))) % 4
    images = np.tile(np.arange(64).reshape(64, 1, 1, 1) * 3, (1, 8, 8, 3)).astype(np.uint8)
    return hvd_cifar.Dataset.from_arrays(images, np.arange(64) % 4, images, labels)
"""
CALLBACK = "import hvd_cifar\nclass Mine(hvd_cifar.Callback):\n    pass\n"


class Job:
    """A folder with the user's files, and commands in it on one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.helper = f"helper_{folder.name}"  # ranks of a group keep modules by their names
        self.write(f"{self.helper}.py", "ACTIVATION = 'relu'\n")
        self.write("net.py", NET.format(helper=self.helper))
        self.write("data.py", DATA)
        self.write("cb.py", CALLBACK)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new, 1))

    def train(self, steps: int, *words: Any, run: Path | None = None, **env: str) -> Any:
        given: list[Any] = ["--model", f"{self.folder}/net.py:build", "--dataset", f"{self.folder}/data.py:load"]
        given += ["--callbacks", f"{self.folder}/cb.py:Mine", "--global-batch-size", 16, "--precision", "float32"]
        given += ["--learning-rate", 0.01]
        return self.call("train", *given, "--max-steps", steps, "--run-dir", run or self.run, *words, **env)

    def call(self, *words: Any, **env: str) -> Any:
        return run_ranks(_in_environment, 1, list(map(str, words)), env)[0]


def _in_environment(words: list[str], env: dict[str, str]) -> Any:
    with mock.patch.dict(os.environ, env):
        return command(words)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job whose run has made two steps."""
    made = Job(tmp_path)
    rank = made.train(2)
    assert rank["code"] == 0, rank
    return made


def test_edited_files_are_named_and_used(job: Job) -> None:
    job.write("cb.py", CALLBACK + "edited = True\n")
    job.edit(f"{job.helper}.py", "relu", "no such activation")
    broken = job.train(4)
    for name in ("cb.py", f"{job.helper}.py"):
        assert f"note: {job.folder}/{name} has changed" in "\n".join(broken["errors"])
    assert broken["code"] == 2 and "no such activation" in broken["errors"][-1]


def test_a_run_goes_on_and_is_evaluated_where_its_files_have_moved(job: Job) -> None:
    files, job.folder = job.folder, job.folder / "moved"
    job.folder.mkdir()
    for path in files.glob("*.py"):
        path.rename(job.folder / path.name)
    rank = job.train(4)
    assert rank["code"] == 0 and runs.summary(job.run)["steps"] == 4, rank
    assert job.call("evaluate", "--run-dir", job.run)["code"] == 0


def test_the_test_set_is_compared_also_where_no_file_has_changed(job: Job) -> None:
    rank = job.train(4, SHIFT="1")
    assert rank["code"] == 2 and "other settings (test sha256 was " in rank["errors"][0]
    notes = [job.call("evaluate", "--run-dir", job.run, SHIFT=shift)["errors"] for shift in "01"]
    assert not notes[0] and "its test examples are not those of the run" in notes[1][0]


def test_all_starts_of_a_job_use_the_first_one_s_files(job: Job) -> None:
    whole, cut = job.folder / "whole", job.folder / "cut"
    assert job.train(4, run=whole)["code"] == 0
    assert job.train(2, run=cut, HVD_CIFAR_LAUNCH="[7.0]")["code"] == 0
    job.edit("net.py", 'name="hidden"', 'name="other"')
    (job.folder / "data.py").unlink()
    rank = job.train(4, run=cut, HVD_CIFAR_LAUNCH="[7.0, 1]")
    assert rank["code"] == 0 and not rank["errors"], rank
    assert runs.summary(cut)["weights_sha256"] == runs.summary(whole)["weights_sha256"]


def test_a_finished_run_is_used_with_the_net_that_it_was_trained_with(job: Job) -> None:
    before = job.call("evaluate", "--run-dir", job.run)
    job.edit("net.py", "Dense(8, ", "Dense(9, ")
    shutil.move(job.run, job.folder / "moved")
    moved = job.folder / "moved"
    after = job.call("evaluate", "--run-dir", moved)
    assert before["code"] == after["code"] == 0 and before["said"][-1] == after["said"][-1]
    assert not before["errors"] and f"note: {job.folder}/net.py has changed since training" in after["errors"][0]
    asked = job.call("evaluate", "--run-dir", moved, "--model", f"{job.folder}/net.py:build")
    (line,) = (line for line in asked["errors"] if line.startswith("hvd_cifar: "))
    assert asked["code"] == 2 and "hidden/kernel" in line and "(192, 8)" in line and "(192, 9)" in line
    assert job.call("export", moved, "--to", job.folder / "exported")["code"] == 0
    (copy,) = (moved / "code").glob("*-net.py")
    copy.write_text("# edited\n")
    damaged = job.call("evaluate", "--run-dir", moved)
    assert damaged["code"] == 2 and f"{copy} is not what the run has written there" in damaged["errors"][-1]
