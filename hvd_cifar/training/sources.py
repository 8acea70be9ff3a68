"""The data set of a run: the same one on every host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import tensorflow as tf

from hvd_cifar import fields
from hvd_cifar.config import DataSettings
from hvd_cifar.data import replicate
from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.data.dataset import UNNAMED, Dataset
from hvd_cifar.data.place import Onlooker, searched
from hvd_cifar.data.replicate import File
from hvd_cifar.data.source import Prepared, Source, prepare, source_of
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World
from hvd_cifar.training import user_code

T = TypeVar("T")

Hosts = Mapping[int, str]  # names of all hosts, each by the rank that acts for the host


def prepare_data(settings: DataSettings, world: World, own: Dataset | Callable[[], Dataset] | None = None) -> Dataset:
    """The run's data set, found, made or fetched on every host; a collective.

    Args:
        own: the user's data set, or a function that every rank calls for it. None: the settings name a built-in set.

    Raises:
        UserError: on every rank, where one host cannot get the data, or hosts have different data.
    """
    if own is not None:
        return _own_dataset(own, settings)
    alone = settings.data_source == "local" or world.size == world.local_size
    dataset = _from_each_host(settings, world) if alone else _from_rank_0(settings, world)
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
    if differing := differences((f"rank {rank}", _short(digest)) for rank, digest in enumerate(digests)):
        raise UserError(
            f"{told} is not the same on all ranks (SHA-256 {differing}): make the same arrays, in the same order, on "
            "every rank"
        )
    return dataset


def _prepare_as(name: str, settings: DataSettings, watched: bool) -> Prepared:
    settings = settings.model_copy(update={"dataset": name})
    return prepare(settings, terminal.complain, Onlooker(watched, Watch.sign_of_life))


def _from_each_host(settings: DataSettings, world: World) -> Dataset:
    watched = terminal.is_watched() and world.is_root  # one progress bar, that of rank 0's host
    hosts, speaker = name_hosts(world)

    # One rank per host locates or downloads the data; more would only load the server.
    def look() -> tuple[str, Path] | None:
        prepared = _prepare_as(settings.dataset, settings, watched) if world.rank in hosts else None
        return (prepared.source.name, prepared.folder) if prepared else None

    found = {rank: it for rank, it in enumerate(collectives.all_gather_object(collectives.on_every_rank(look))) if it}
    if differing := differences((host, found[rank][0]) for rank, host in hosts.items()):
        raise UserError(_different(differing))
    name, folder = found[speaker]
    dataset = collectives.on_every_rank(lambda: source_of(name, settings).read(folder))
    if len(hosts) > 1:
        digest = collectives.on_every_rank(lambda: dataset.digest if world.rank in hosts else "")
        digests = collectives.all_gather_object(digest)
        if differing := differences((host, _short(digests[rank])) for rank, host in hosts.items()):
            raise UserError(
                f"hosts have different data under the name {dataset.name} (SHA-256 {differing}): copy one host's files "
                "to the others, or leave out --data-source local"
            )
    return dataset


def differences(found: Iterable[tuple[str, str]]) -> str:
    """Which hosts (or ranks) have which value, in words; empty where all have the same.

    Args:
        found: host and value, in the order of ranks.
    """
    by_thing: dict[str, list[str]] = {}
    for host, thing in found:
        by_thing.setdefault(thing, []).append(host)
    if len(by_thing) == 1:
        return ""
    return "; ".join(f"{thing} on {_listed(hosts)}" for thing, hosts in by_thing.items())


def _listed(hosts: Sequence[str], most: int = 4) -> str:
    return ", ".join(hosts[:most]) + f" and {len(hosts) - most} more" * (len(hosts) > most)


def _short(digest: str) -> str:
    return digest[:12]


def _different(differing: str) -> str:
    return f"hosts have different data sets ({differing}): give --dataset, or one --data-dir alike on all"


def speakers(ranks: Sequence[tuple[str, int, int]]) -> list[int]:
    """For each rank, the rank that acts for its host: the one whose local rank is 0.

    Hosts may share a name. Launchers fill such hosts one after the other, or round-robin. In both cases a rank belongs
    to the first of them that lacks its local rank.

    Args:
        ranks: host name, local rank and local size of each rank.
    """
    found: list[int] = []
    for rank, (host, local_rank, local_size) in enumerate(ranks):
        if local_rank == 0:
            found.append(rank)
            continue
        alike = [s for s in dict.fromkeys(found) if ranks[s] == (host, 0, local_size)]
        found.append(next(s for s in alike if found.count(s) == local_rank))
    return found


def name_hosts(world: World) -> tuple[Hosts, int]:
    """All hosts in rank order, with unique names, and the rank that acts for this host. A collective."""
    ranks = collectives.all_gather_object((world.host, world.local_rank, world.local_size))
    of_rank = speakers(ranks)
    names = [ranks[speaker][0] for speaker in dict.fromkeys(of_rank)]
    hosts = {s: ranks[s][0] + f" (rank {s})" * (names.count(ranks[s][0]) > 1) for s in dict.fromkeys(of_rank)}
    return hosts, of_rank[world.rank]


def _from_rank_0(settings: DataSettings, world: World) -> Dataset:
    """Rank 0's set on every host; hosts that lack it receive it."""
    hosts, speaker = name_hosts(world)
    watched = terminal.is_watched()

    def at_root() -> tuple[str, Path, dict[str, File]]:
        source, folder = _prepare_as(settings.dataset, settings, watched)
        return source.name, folder, replicate.describe(folder, source.files(folder))

    name, origin, expected = collectives.on_root(at_root)
    source = source_of(name, settings)

    def look() -> Path | None:
        if world.rank not in hosts:
            return None
        # The other hosts may decode images at the same time: only the first of them shows a progress bar.
        onlooker = Onlooker(watched and list(hosts)[1:2] == [world.rank], Watch.sign_of_life)
        return _own_folder(source, settings, expected, hosts[world.rank], onlooker)

    mine = collectives.on_every_rank(look)
    folders = collectives.all_gather_object(mine)
    lacking = [host for rank, host in hosts.items() if folders[rank] is None]
    if lacking:
        here = world.rank in hosts and mine is None
        place = collectives.on_every_rank(lambda: _place(source, settings.data_dir, expected) if here else None)
        _send(origin, place, settings.data_dir, expected, world)
        folders = collectives.all_gather_object(mine or place)
        if world.is_root:
            size = sum(file.bytes for file in expected.values()) / 1e6
            terminal.say(f"{name} sent to {', '.join(lacking)}: {size:.0f} MB each, SHA-256 checked")
    folder = folders[speaker]
    assert folder is not None, "every host has the set, or received it"
    return collectives.on_every_rank(lambda: source.read(folder))


def _own_folder(
    source: Source, settings: DataSettings, expected: Mapping[str, File], host: str, onlooker: Onlooker
) -> Path | None:
    """The folder in which this host has rank 0's set; None: it lacks the set.

    Raises UserError where it has another set, unless --data-source rank0 is given.
    """
    would_take_its_own = settings.dataset == "auto" and source_of(CIFAR10.name, settings).locate() is not None
    if would_take_its_own and source.name != CIFAR10.name:
        raise UserError(_different(differences([("rank 0's host", source.name), (host, CIFAR10.name)])))
    try:
        folder = source.locate(onlooker)
        fault = _fault(source, folder, expected) if folder is not None else None
    except UserError:
        if settings.data_source != "rank0":
            raise
        folder = fault = None  # whatever is wrong with this host's
    if folder is not None and fault is None:
        return folder
    if folder is None or settings.data_source == "rank0":
        received = _received(settings.data_dir, expected)
        with searched(settings.data_dir):
            return received if received.is_dir() and _fault(source, received, expected) is None else None
    raise UserError(f"{host}: {fault}: move {folder} away to have rank 0's sent, or give --data-source rank0 or local")


def _fault(source: Source, folder: Path, expected: Mapping[str, File]) -> str | None:
    """How a folder differs from rank 0's set, in words; None: not at all."""
    if fault := source.fault(folder):
        return fault
    found = replicate.describe(folder, list(expected))
    other = next((name for name in expected if found[name] != expected[name]), None)
    return f"{folder / other} is not rank 0's (its SHA-256 is another one)" if other else None


def _place(source: Source, data_dir: Path, expected: Mapping[str, File]) -> Path:
    """The folder for a set that a host receives: the usual place, or another where that is occupied."""
    usual = source.place
    with searched(data_dir):
        taken = usual is None or source.locate() is not None or (usual.is_dir() and any(usual.iterdir()))
    return _received(data_dir, expected) if usual is None or taken else usual


def _received(data_dir: Path, expected: Mapping[str, File]) -> Path:
    digests = sorted((name, file.sha256) for name, file in expected.items())
    return data_dir / f"{replicate.RECEIVED}{hashlib.sha256(repr(digests).encode()).hexdigest()[:12]}"


def _send(origin: Path, place: Path | None, data_dir: Path, expected: Mapping[str, File], world: World) -> None:
    """Broadcast rank 0's files; this rank writes them to `place`, or only takes part where that is None."""
    sender = replicate.Sender(origin) if world.is_root else None
    receiver = replicate.Receiver(data_dir, expected) if place else None
    for block in replicate.blocks(expected):
        content = sender.read(block) if sender else np.zeros(block.length, np.uint8)
        content = collectives.broadcast_bytes(content)
        Watch.sign_of_life()
        if receiver:
            receiver.take(block, content)

    def finish() -> None:
        if sender:
            sender.finish()
        if receiver and place:
            receiver.finish(place)

    collectives.on_every_rank(finish)


def read_batches(batches: Iterable[T]) -> Iterator[T]:
    """The batches of a pipeline. A file that becomes unreadable ends the job.

    Raises:
        UserError: on the rank that notices.
    """
    try:
        yield from batches
    except tf.errors.OpError as failure:  # from a function that tf.data calls: only the text names its error
        found = re.search(r"UserError: (.*)", failure.message or "")
        if found is None:
            raise
        error = UserError(found[1])
        error.of_one_rank = True
        raise error from None
