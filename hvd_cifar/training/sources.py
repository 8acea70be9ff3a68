"""The data set of a run: the same one on every host."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from hvd_cifar import fields
from hvd_cifar.config import DataSettings
from hvd_cifar.data.dataset import UNNAMED, Dataset
from hvd_cifar.data.host_files import Onlooker, access, digest_of
from hvd_cifar.data.source import prepare, source_of
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.files import PART, complain
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.ranks import differences
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World
from hvd_cifar.training import user_code

Digests = Mapping[str, str]  # SHA-256 of files, by name

BLOCK_BYTES = 4 << 20  # of a file that is sent


def prepare_data(settings: DataSettings, world: World, own: Dataset | Callable[[], Dataset] | None = None) -> Dataset:
    """The run's data set, the same files on every host; a collective.

    Rank 0 finds or makes the files. Each other host has the same ones, or is sent them. `own` is the user's data set,
    or a function that every rank calls for it; None: the settings name a built-in set. UserError, on every rank, where
    one host cannot get the data, or hosts have different data.
    """
    if settings.image_size and not settings.dataset.startswith(fields.FOLDER_DATASET):
        raise UserError("--image-size goes with --dataset folder:PATH; give a data set of your own images of one size")
    if own is not None:
        return _own_dataset(own, settings)
    firsts = [rank.first for rank in world.ranks]
    names = [f"{rank.host} (rank {rank.first})" for rank in world.ranks]  # hosts may share a name
    others = [rank for rank in dict.fromkeys(firsts) if rank != 0]  # which act for hosts that are not rank 0's
    onlooker = Onlooker(Watch.sign_of_life)
    if world.rank in [0, *others[:1]]:  # hosts decode at the same time: one of them shows its progress
        onlooker = replace(onlooker, is_shown=complain)
    if world.is_root:
        onlooker = replace(onlooker, is_warned=complain)

    def at_root() -> tuple[str, Path, Digests]:
        source, folder = prepare(settings, onlooker)
        return source.name, folder, {file: digest_of(folder / file) for file in source.files if others}

    name, origin, digests = collectives.on_root(at_root)
    source = source_of(settings, name)
    received = settings.data_dir / f"received-{hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12]}"

    def find() -> Path | None:
        if world.rank not in others:
            return origin
        found = source.locate(settings.data_dir, onlooker)
        if found and (other := _differing(found, digests)):
            raise UserError(
                f"{names[world.rank]}: {other} is damaged or not rank 0's (its SHA-256 is another one): move {found} "
                "away to have rank 0's sent"
            )
        return found or (None if _differing(received, digests) else received)

    folders = collectives.all_gather_object(collectives.on_every_rank(find))
    if lacking := [rank for rank in others if folders[rank] is None]:
        _send(origin, digests, received if world.rank in lacking else None)
        if world.is_root:
            size = sum((origin / file).stat().st_size for file in digests) / 1e6
            to = ", ".join(names[rank] for rank in lacking)
            terminal.say(f"{name} sent to {to}: {size:.0f} MB each, SHA-256 checked")
    dataset = collectives.on_every_rank(lambda: source.read(folders[firsts[world.rank]] or received))
    # Rank 0's class names for all: they may be in a file that other hosts lack.
    return replace(dataset, class_names=collectives.broadcast_object(dataset.class_names))


def _own_dataset(own: Dataset | Callable[[], Dataset], settings: DataSettings) -> Dataset:
    named = settings.dataset if fields.is_user_code(settings.dataset) else ""
    told = f"--dataset {named}" if named else "the data set"

    def load() -> Dataset:
        with user_code.errors_of(f"{told}, called without arguments"):
            dataset = own() if callable(own) else own
        if not isinstance(dataset, Dataset):
            raise UserError(
                f"{told} is a {type(dataset).__name__}: have the function return a hvd_cifar.Dataset, such as "
                "Dataset.from_arrays(train_images, train_labels, test_images, test_labels)"
            )
        return replace(dataset, name=Path(named).name) if named and dataset.name == UNNAMED else dataset

    dataset = collectives.host_by_host(load)
    digests = collectives.all_gather_object(collectives.on_every_rank(lambda: dataset.digest))
    if differing := differences((f"rank {rank}", digest[:12]) for rank, digest in enumerate(digests)):
        raise UserError(
            f"{told} is not the same on all ranks (SHA-256 {differing}): make the same arrays, in the same order, on "
            "every rank"
        )
    return dataset


def _differing(folder: Path, expected: Digests) -> Path | None:
    """The first file of a folder that is not as expected."""
    return next((folder / name for name, digest in expected.items() if digest_of(folder / name) != digest), None)


def _send(origin: Path, digests: Digests, received: Path | None) -> None:
    """Broadcast rank 0's files into the folder `received` of ranks that have one. A collective.

    The folder is named after the files' bytes. So jobs that receive at the same time write the same bytes to the same
    places, and what a killed rank has left is written again.
    """
    for name, digest in digests.items():
        start, block = 0, b"-"
        while block:
            block = collectives.on_root(partial(_read, origin / name, start))
            collectives.on_every_rank(partial(_receive, received, name, digest, start, block))
            Watch.sign_of_life()
            start += len(block)


def _read(path: Path, start: int) -> bytes:
    with access("read", path.parent), open(path, "rb") as file:
        file.seek(start)
        return file.read(BLOCK_BYTES)


def _receive(folder: Path | None, name: str, digest: str, start: int, block: bytes) -> None:
    """Write a block of a file; the last one is empty, and gives the file its name. UserError where it is damaged."""
    if folder is None:
        return
    part = folder / f"{name}{PART}"
    with access("write", folder):
        if block:
            folder.mkdir(parents=True, exist_ok=True)
            with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
                file.seek(start)
                file.write(block)
        elif digest_of(folder / name) != digest:  # else another job was faster
            if digest_of(part) != digest:
                raise UserError(f"{folder / name} arrived damaged (its SHA-256 differs): start again")
            os.replace(part, folder / name)
