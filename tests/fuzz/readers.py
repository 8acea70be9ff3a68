"""The readers of files that a user, a disk or another program may have damaged: any bytes give a value or a UserError.

Each reader gets a file's content, writes it where the program would find it, and reads it. An error of the program
passes through: it is a find.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_cifar import config
from hvd_cifar.data import folder
from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import parse_hosts, read_hostfile
from hvd_cifar.reporting import story
from hvd_cifar.reporting.metrics import _keep_events_up_to
from hvd_cifar.reporting.run_files import Train, read_run
from hvd_cifar.tools.report import content as content_of
from hvd_cifar.training import checkpoint, checkpoint_files, run_dir
from tests.run_dirs import CONFIG

CORPUS = Path(__file__).parent / "corpus"
SMALL = replace(CIFAR10, train_files=("data_batch_1.bin",), train_records=2, test_records=2)


def _data(content: bytes, place: Path) -> None:
    (place / "test_batch.bin").write_bytes(bytes(SMALL.bytes_of("test_batch.bin")))
    (place / "data_batch_1.bin").write_bytes(content)
    SMALL.read(place).train.images[:]


def _names(content: bytes, place: Path) -> None:
    (place / SMALL.names_file).write_bytes(content)
    _data(bytes(SMALL.bytes_of("data_batch_1.bin")), place)


def _cache(content: bytes, place: Path) -> None:
    """The description of a cache, beside pixels."""
    for name in folder.FILES:
        (place / name).write_bytes(content if name == folder.ABOUT else bytes(12))
    folder.Folder(place, place).read(place)


def _image(content: bytes, place: Path) -> None:
    (place / "image.png").write_bytes(content)
    with contextlib.suppress(folder._NotGrey):
        folder._decode(place / "image.png", (4, 4, 1))


def _config(content: bytes, place: Path) -> None:
    (place / "settings.yaml").write_bytes(content)
    config.make(config.TrainSettings, config.read_file(place / "settings.yaml"))


def _record(content: bytes, place: Path) -> None:
    """A run's config.json, as a run that goes on and an evaluation read it."""
    path = place / "config.json"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        checkpoint.differences(path, {"seed": 0, "model": "fast", "dataset": "cifar10"})
    with contextlib.suppress(UserError):
        run_dir.changed_kernels(place, "AVX2")
    run_dir.continue_run(config.make(config.TrainSettings, {"run_dir": place}))


def _hostfile(content: bytes, place: Path) -> None:
    (place / "hosts").write_bytes(content)
    with contextlib.suppress(UserError):
        read_hostfile(place / "hosts")
    parse_hosts(content.decode(errors="surrogateescape"))


def _manifest(content: bytes, place: Path) -> None:
    (place / "state.index").write_bytes(b"index")
    (place / checkpoint_files.MANIFEST).write_bytes(content)
    checkpoint_files.damage(place)


def _metrics(content: bytes, place: Path) -> None:
    (place / "metrics.jsonl").write_bytes(content)
    events: list[dict[str, Any]] = []
    _keep_events_up_to(place / "metrics.jsonl", 10, events.append)
    assert all(event["step"] <= 10 for event in events)
    assert _keep_events_up_to(place / "metrics.jsonl", 10, events.append)[1] == 0  # what stays is whole


def _summary(content: bytes, place: Path) -> None:
    (place / "summary.json").write_bytes(content)
    assert isinstance(run_dir.read_summary(place), dict)


def _run(content: bytes, place: Path) -> None:
    """A run's files, as `watch` and `report` read them."""
    names = ("metrics.jsonl", "sessions.jsonl", "summary.json", "confusion.json")
    for name, part in zip(names, content.split(b"\0files\0"), strict=False):
        (place / name).write_bytes(part)
    (place / "config.json").write_text(json.dumps(CONFIG))
    found = read_run(place)
    assert all(one.text.isprintable() for one in story.happenings(found.marks))
    if found.of_kind(Train):  # drawing takes a second: tests/single/test_report.py draws the corpus
        content_of.results(found), content_of.shares(found), content_of.by_rank(found)


READERS: dict[str, Callable[[bytes, Path], None]] = {
    "cache": _cache,
    "config": _config,
    "data": _data,
    "hostfile": _hostfile,
    "image": _image,
    "manifest": _manifest,
    "metrics": _metrics,
    "names": _names,
    "record": _record,
    "run": _run,
    "summary": _summary,
}


def read(name: str, content: bytes, place: Path) -> None:
    """Let a reader read; its UserError is of one line."""
    try:
        READERS[name](content, place)
    except UserError as refused:
        assert len(str(refused).splitlines()) == 1, str(refused)
        assert len(str(refused)) < 1000, str(refused)
