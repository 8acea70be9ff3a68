"""The core knows no extension: a run without one of their files ends with the same bits. Callbacks can do as much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from hvd_cifar import extensions
from hvd_cifar.config import RunOptions
from tests.options import FEW, SMALL_NET
from tests.ranks import CHECKOUT, run_ranks

NAMES = [name for name in extensions.ORDER if name == name.lower()]
EXAMPLE = f"{CHECKOUT}/examples/my_extension.py:GradientNorm"


def _digests(folder: str, names: list[str]) -> dict[str, str]:
    """The digests of a run with all extensions, and of runs that lack one each."""
    import sys

    import hvd_cifar

    options: dict[str, Any] = {"global_batch_size": 12, "max_steps": 4, "eval_every": 2, "checkpoint_every": 3}
    found = {}
    for name in ("", *names):
        module = f"hvd_cifar.extensions.{name}"
        kept = sys.modules.pop(module, None)
        if name:
            sys.modules[module] = None  # type: ignore[assignment]
        try:
            summary = hvd_cifar.train(SMALL_NET, FEW, run_dir=f"{folder}/{name or 'whole'}", quiet=True, **options)
        finally:
            sys.modules.pop(module, None)
            if kept:
                sys.modules[module] = kept
        found[name] = summary["weights_sha256"]
        assert len(set(summary["weights_sha256_by_rank"])) == 1
    return found


def test_a_run_without_an_extension_s_file_ends_with_the_same_bits(tmp_path: Path) -> None:
    for found in run_ranks(_digests, 2, str(tmp_path), NAMES, timeout=300):
        assert set(found) == {"", *NAMES} and len(set(found.values())) == 1, found


def test_the_options_of_an_extension_go_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = extensions.with_settings("Whole", RunOptions).model_fields
    monkeypatch.setitem(__import__("sys").modules, "hvd_cifar.extensions.example_ledger", None)
    left = extensions.with_settings("Left", RunOptions).model_fields
    assert set(whole) - set(left) == {"record_examples"} and set(left) < set(whole)


def test_an_extension_that_fails_is_not_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only where its own file is missing is it left out: a package that it needs is an error."""
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.setattr(extensions, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        extensions._module("broken")


def _norms(folder: str) -> list[Any]:
    """A run in one part and in two, with the callback of the example; its numbers after each."""
    import hvd_cifar
    from hvd_cifar.training import user_code

    found, own = [], user_code.load(EXAMPLE, "--callbacks")
    for place, steps in (("whole", 6), ("cut", 3), ("cut", 6)):
        options: dict[str, Any] = {"global_batch_size": 12, "max_steps": steps, "log_every": 2, "eval_every": 0}
        options |= {"deterministic": True, "run_dir": f"{folder}/{place}"}
        summary = hvd_cifar.train(SMALL_NET, FEW, callbacks=[own()], **options)
        found.append([summary["gradient_norm"], summary["weights_sha256"]])
    return found


def test_a_callback_keeps_a_number_of_its_own_in_the_checkpoint(tmp_path: Path) -> None:
    """The example: a running mean of the gradient's norm, computed in the step, saved, logged and summed up."""
    for whole, first, resumed in run_ranks(_norms, 2, str(tmp_path), deterministic=True):
        assert resumed == whole and first != whole and whole[0] > 0
    assert any(b"gradient_norm" in path.read_bytes() for path in (tmp_path / "whole/tensorboard").iterdir())
    norms = {e["step"]: e["mean"] for e in runs.events(tmp_path / "cut") if e["event"] == "gradient_norm"}
    assert set(norms) == {2, 3, 4, 6}
