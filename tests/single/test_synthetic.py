"""The embedded data set: the same bytes everywhere, and what takes its place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data import source, synthetic
from hvd_cifar.data.cifar import CIFAR10, DownloadError
from hvd_cifar.data.host_files import Onlooker
from hvd_cifar.data.source import prepare
from hvd_cifar.data.synthetic import LAYOUT

# Of the six files one after the other. A change of the drawing needs a new name, or results of the same name could no
# longer be compared.
MD5 = {"synthetic-v2": "c829d6d2a91882896b08d1f678c826f9"}
NOBODY = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # the discard port: nobody listens there


def test_every_machine_draws_these_bytes_once(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    for name in LAYOUT.files:
        digest.update((embedded / LAYOUT.folder / name).read_bytes())
    assert digest.hexdigest() == MD5[LAYOUT.folder]
    names = (embedded / LAYOUT.folder / "batches.meta.txt").read_text().split()
    assert names == ["disc", "ring", "square", "frame", "triangle", "plus", "cross", "bars", "pillars", "checker"]
    assert {path.name for path in embedded.iterdir()} <= {LAYOUT.folder, ".lock"}
    monkeypatch.setattr(synthetic, "draw_file", lambda number: pytest.fail("drew it again"))
    assert named("synthetic", embedded, pytest.fail) == ("synthetic", embedded / LAYOUT.folder)


def named(name: str, data_dir: Path, warn: Callable[[str], None]) -> tuple[str, Path]:
    settings = make(DataSettings, {"dataset": name, "data_dir": data_dir})
    found, folder = prepare(settings, Onlooker(is_warned=warn))
    return found.name, folder


def test_prepare_by_name(embedded: Path) -> None:
    dataset = LAYOUT.read(embedded / LAYOUT.folder)
    assert (dataset.name, dataset.classes, dataset.image_shape) == ("synthetic", 10, (32, 32, 3))
    assert dataset.class_names == tuple(synthetic.FIGURES)
    for labels in (*dataset.train.labels.reshape(5, 10_000), dataset.test.labels):
        assert np.bincount(labels).tolist() == [len(labels) // 10] * 10


def test_auto_falls_back_with_a_warning_and_cifar10_does_not(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setitem(source.LAYOUTS, "cifar10", replace(CIFAR10, archive=NOBODY))
    warnings: list[str] = []
    assert named("auto", embedded, warnings.append) == ("synthetic", embedded / LAYOUT.folder)
    assert len(warnings) == 1
    assert "NOT CIFAR-10" in warnings[0] and NOBODY in warnings[0] and "\n" not in warnings[0]
    with pytest.raises(DownloadError, match=NOBODY):
        named("cifar10", embedded, pytest.fail)
