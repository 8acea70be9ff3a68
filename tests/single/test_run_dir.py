"""The run directory: one run at a time, and only the same run goes on in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hvd_cifar.config import TrainSettings, make
from hvd_cifar.errors import UserError
from hvd_cifar.training import checkpoint, run_dir
from hvd_cifar.training.record import MUST_MATCH, compared
from hvd_cifar.training.run_dir import claim
from hvd_cifar.training.trained import settings_of

FACTS: dict[str, Any] = {
    "dataset": "cifar10",
    "global_batch_size": 128,
    "examples_sha256": "1f",
    "learning_rate_schedule": "0.1",
    "weight_decay": 0.5,
    "lookahead": False,
    "image_scales": "",
}
KERNELS = {**FACTS, "convolutions": "AVX2"}
# For each setting of the course another value than the default.
OTHERS: dict[str, Any] = {
    "model": "resnet20",
    "precision": "float64",
    "seed": 1,
    "clip_norm": 1.0,
    "hold_out": 10,
    "compression": "fp16",
    "sync_batch_norm": True,
    "virtual_shards": 4,
    "deterministic": True,
}


@pytest.fixture(autouse=True)
def released(tmp_path: Path) -> Iterator[None]:
    yield
    run_dir.release()


def _settings(folder: Path, **more: Any) -> TrainSettings:
    return make(TrainSettings, {"run_dir": str(folder), **more})


def _run(folder: Path, step: int, facts: dict[str, Any] = FACTS, **more: Any) -> Path:
    """A run directory with a checkpoint and the record of its settings; the checkpoint's path."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    path = checkpoint.write(folder / "checkpoints", step, {})
    settings = _settings(folder, **more).model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps({**settings, "run": facts}))
    return path


def _claim(folder: Path, facts: dict[str, Any] = FACTS, **more: Any) -> Path | None:
    settings = _settings(folder, **more)
    claimed, newest = claim(settings, compared(settings, facts))
    assert claimed == folder
    return newest


def test_a_folder_is_one_run_s_until_it_lets_it_go(tmp_path: Path) -> None:
    assert _claim(tmp_path) is None
    with pytest.raises(UserError, match="another run is writing there"):
        _claim(tmp_path)
    run_dir.release()
    assert _claim(tmp_path) is None


def test_a_restart_waits_for_the_lock_of_a_lost_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a file server keeps it for a host that does not answer."""
    monkeypatch.setenv("HVD_CIFAR_LAUNCH", "[1.0, 1]")
    held = FileLock(tmp_path / ".lock", thread_local=False)
    held.acquire()
    threading.Timer(0.5, held.release).start()
    assert _claim(tmp_path) is None
    assert "which the lost rank 0 may still hold" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints/step-3"])
def test_a_folder_of_something_else_is_left_alone(name: str, tmp_path: Path) -> None:
    (place := tmp_path / name).parent.mkdir(exist_ok=True)
    place.mkdir() if "/" in name else place.write_text("mine\n")
    with pytest.raises(UserError, match=f"holds {place.name}, but no config.json"):
        _claim(tmp_path)
    assert place.exists() and not (tmp_path / ".lock").exists()


def test_the_same_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    _run(tmp_path, 5)
    newest = _run(tmp_path, 12)
    assert _claim(tmp_path) == newest


def test_a_damaged_checkpoint_is_passed_over_and_no_whole_one_ends_the_run(tmp_path: Path) -> None:
    older, newest = _run(tmp_path, 5), _run(tmp_path, 12)
    (newest / "state.npz").unlink()
    (tmp_path / "checkpoints" / "step-final").mkdir()
    (tmp_path / "checkpoints" / "checkpoint").write_bytes(b"\xff")
    assert _claim(tmp_path) == older
    run_dir.release()
    with pytest.raises(UserError, match=r"step-12 \(state.npz: No such file.*\), and no whole one"):
        _claim(tmp_path / "own", resume=str(newest))
    (older / "state.npz").write_bytes(b"\xff")
    with pytest.raises(UserError, match="step-12 .*, and no whole one"):  # the run does not begin anew
        _claim(tmp_path)


# Settings that a resumed run may change: where and how it computes and reports, and how far it goes. Facts that are
# compared say what batch, learning rate and images come to.
FREE = """
    batch_size bucket_bytes callbacks check_sync_every checkpoint_every checkpoint_minutes data_dir
    dataset early_stopping epochs eval_every global_batch_size grace_seconds gradient_accumulation image_size
    learning_rate log_every max_steps max_unreadable overlap quiet record_examples resume run_dir set
    stall_seconds threads_per_rank
"""


def test_every_setting_of_the_course_is_compared() -> None:
    assert set(OTHERS) == set(MUST_MATCH)
    assert set(TrainSettings.model_fields) - set(MUST_MATCH) == set(FREE.split())


@pytest.mark.parametrize("name", [*MUST_MATCH, *FACTS])
def test_a_run_with_another_setting_or_on_other_data_does_not_go_on(name: str, tmp_path: Path) -> None:
    _run(tmp_path, 5)
    facts, options = ({**FACTS, name: "other"}, {}) if name in FACTS else (FACTS, {name: OTHERS[name]})
    with pytest.raises(UserError, match=rf"other settings \(.*{name.replace('_', ' ')} was "):
        _claim(tmp_path, facts, **options)


def test_a_run_goes_on_where_net_and_data_have_moved_but_not_with_others(tmp_path: Path) -> None:
    then, now = ({**FACTS, "dataset": f"folder:/{place}/birds"} for place in ("box", "cluster"))
    newest = _run(tmp_path, 5, then, model="/box/net.py:build")
    assert _claim(tmp_path, now, model="/cluster/net.py:build") == newest
    for facts, model in ((FACTS, "net.py:build"), (now, "net.py:other"), (now, "other.py:build")):
        run_dir.release()
        with pytest.raises(UserError, match="other settings"):
            _claim(tmp_path, facts, model=f"/cluster/{model}")


def test_only_virtual_shards_need_the_same_convolutions(tmp_path: Path) -> None:
    other = {**KERNELS, "convolutions": "TensorFlow's"}
    newest = _run(tmp_path / "plain", 5, KERNELS)
    assert _claim(tmp_path / "plain", other) == newest
    _run(tmp_path / "exact", 5, KERNELS, virtual_shards=4)
    with pytest.raises(UserError, match="convolutions was AVX2, is TensorFlow's"):
        _claim(tmp_path / "exact", other, virtual_shards=4)


@pytest.mark.parametrize("name", ["dataset", "examples_sha256", "global_batch_size"])
def test_a_run_does_not_start_from_another_one_s_checkpoint_on_other_data(name: str, tmp_path: Path) -> None:
    given = _run(tmp_path / "other", 5, {**FACTS, name: "other"})
    with pytest.raises(UserError, match=f"{name.replace('_', ' ')} was other"):
        _claim(tmp_path / "own", resume=str(given))


def test_a_run_starts_from_another_one_with_another_learning_rate_and_then_goes_on_by_itself(tmp_path: Path) -> None:
    given = _run(tmp_path / "other", 5)
    faster = {**FACTS, "learning_rate_schedule": "0.2"}
    assert _claim(tmp_path / "own", faster, resume=str(given)) == given
    run_dir.release()
    newest = _run(tmp_path / "own", 9, faster, resume=str(given))
    assert _claim(tmp_path / "own", faster, resume=str(given)) == newest
    run_dir.release()
    with pytest.raises(UserError, match="already has a run"):
        _claim(tmp_path / "own", faster, resume=str(_run(tmp_path / "third", 7)))


@pytest.mark.parametrize(("text", "why"), [("{", "Expecting"), ('{"run": {}, "global_batch_size": "many"}', "many")])
def test_a_damaged_record_is_told_as_that_file(text: str, why: str, tmp_path: Path) -> None:
    """Not as --config, which nobody gave."""
    (path := tmp_path / "config.json").write_text(text)
    asked = make(TrainSettings, {"run_dir": str(tmp_path)})
    for read in (lambda: run_dir.continue_run(asked), lambda: settings_of(tmp_path)):
        with pytest.raises(UserError, match=f"^{path} is damaged .*{why}.*: bring it back"):
            read()
