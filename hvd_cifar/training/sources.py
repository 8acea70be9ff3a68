"""The data set of a run: the same one on every host, seen as the run's model sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hvd_cifar import config
from hvd_cifar.data import cifar, replicate, synthetic
from hvd_cifar.data.augment import FAST_VIEWS, STANDARD_VIEWS, TUTORIAL_VIEWS, Views
from hvd_cifar.data.dataset import Prepared, prepare
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import World


def views_of(model: str, augmentation: config.Augmentation = "recipe") -> Views:
    """How a model sees images."""
    views = {"tutorial": TUTORIAL_VIEWS, "fast": FAST_VIEWS}.get(model, STANDARD_VIEWS)
    if augmentation == "none":
        return views._replace(train=lambda images, _: views.test(images))
    return views


def prepare_data(settings: config.DataSettings, world: World) -> Prepared:
    """Find, make or fetch the data set on every host; a collective, since it may fail on some hosts only.

    Raises:
        UserError: on every rank, where the data is not to be had on one, or hosts have different data sets.
    """
    if settings.data_source == "local" or world.size == world.local_size:
        return _from_each_host(settings, world)
    return _from_rank_0(settings, world)


def _prepare_as(name: config.DatasetName, settings: config.DataSettings, watched: bool) -> Prepared:
    url, md5 = settings.data_url, settings.data_md5
    return prepare(name, settings.data_dir, url, md5, show_progress=watched, warn=terminal.complain)


def _from_each_host(settings: config.DataSettings, world: World) -> Prepared:
    watched = terminal.is_watched() and world.size == world.local_size

    # One rank of each host looks, and downloads if need be; where nobody answers, the others need not wait for it too.
    def look() -> Prepared | None:
        return _prepare_as(settings.dataset, settings, watched) if world.local_rank == 0 else None

    first = collectives.on_every_rank(look)
    found = sorted({(f.name, host) for f, host in collectives.all_gather_object((first, world.host)) if f is not None})
    names = {name for name, _ in found}
    if len(names) > 1:
        raise UserError(_different(found))
    return collectives.on_every_rank(lambda: first or _prepare_as(names.copy().pop(), settings, watched))


def _different(found: Sequence[tuple[str, str]]) -> str:
    where = ", ".join(f"{name} on {host}" for name, host in found)
    return f"hosts have different data sets ({where}): give --dataset, or one --data-dir alike on all"


def _from_rank_0(settings: config.DataSettings, world: World) -> Prepared:
    """Rank 0's set on every host: those that have it keep theirs, the others are sent it."""
    source = collectives.on_root(lambda: _prepare_as(settings.dataset, settings, terminal.is_watched()))
    expected = collectives.on_root(lambda: replicate.digests(source.folder))
    mine = collectives.on_every_rank(lambda: _own_set(settings, world, source.name, expected))

    speaks = world.local_rank == 0  # for its host
    lacking = sorted(
        host for host, lacks in collectives.all_gather_object((world.host, speaks and mine is None)) if lacks
    )
    if lacking:
        place = _place(settings.data_dir, source.name, expected)
        _send(source.folder, place if speaks and mine is None else None, settings.data_dir, expected, world)
        mine = place if speaks and mine is None else mine
        if world.is_root:
            size = len(cifar.FILES) * cifar.FILE_BYTES / 1e6
            terminal.say(f"{source.name} sent to {', '.join(lacking)}: {size:.0f} MB each, SHA-256 checked")
    folders = {host: folder for host, folder in collectives.all_gather_object((world.host, mine)) if folder is not None}
    return Prepared(source.name, folders[world.host])


def _own_set(
    settings: config.DataSettings, world: World, name: config.DatasetName, expected: Mapping[str, str]
) -> Path | None:
    """Where this host has rank 0's set; None: nowhere, or another rank of the host looks.

    Raises UserError where it has another set, unless that is no matter under --data-source rank0.
    """
    if world.local_rank:
        return None
    if name == "synthetic":
        if settings.dataset == "auto" and cifar.locate(settings.data_dir) is not None:
            raise UserError(_different([("cifar10", world.host), ("synthetic", "rank 0's host")]))
        folder = cifar.locate(settings.data_dir / synthetic.FOLDER)
    else:
        folder = cifar.locate(settings.data_dir)
    received = _received(settings.data_dir, expected)
    if folder is None:
        return None
    fault = cifar.fault(folder)
    if fault is None:
        found = replicate.digests(folder)
        if found == expected:
            return folder
        other = next(file for file in expected if found[file] != expected[file])
        fault = f"{folder / other} is not rank 0's (its SHA-256 is another one)"
    if settings.data_source == "rank0":
        return received if cifar.locate(received) and replicate.digests(received) == expected else None
    raise UserError(
        f"{world.host}: {fault}: move {folder} away to have rank 0's sent, or give --data-source rank0 or local"
    )


def _place(data_dir: Path, name: str, expected: Mapping[str, str]) -> Path:
    """Where a host puts the set that it is sent: where it would be looked for, or beside what is there already."""
    usual = data_dir / (synthetic.FOLDER if name == "synthetic" else cifar.FOLDER)
    taken = usual.exists() if name == "synthetic" else cifar.locate(data_dir) is not None
    return _received(data_dir, expected) if taken else usual


def _received(data_dir: Path, expected: Mapping[str, str]) -> Path:
    return data_dir / f"received-{hashlib.sha256(repr(sorted(expected.items())).encode()).hexdigest()[:12]}"


def _send(source: Path, place: Path | None, data_dir: Path, expected: Mapping[str, str], world: World) -> None:
    """Broadcast rank 0's files; this rank puts them at `place`, if it has one to fill."""
    sender = replicate.Sender(source) if world.is_root else None
    receiver = replicate.Receiver(data_dir) if place else None
    for block in replicate.blocks():
        content = sender.read(block) if sender else np.zeros(block.length, np.uint8)
        content = collectives.broadcast_bytes(content)
        if receiver:
            receiver.take(block, content)

    def finish() -> None:
        if sender:
            sender.finish()
        if receiver and place:
            receiver.finish(expected, place)

    collectives.on_every_rank(finish)
