"""The data set of a run: the same one on every host."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hvd_cifar import fields
from hvd_cifar.config import DataSettings
from hvd_cifar.data.dataset import UNNAMED, Dataset
from hvd_cifar.data.place import Onlooker, digest_of, is_free, locked, searched, written
from hvd_cifar.data.source import Source, prepare, source_of
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World
from hvd_cifar.training import user_code

Hosts = Mapping[int, str]  # names of all hosts, each by the rank that acts for the host
Digests = Mapping[str, str]  # SHA-256 of files, by name

BLOCK_BYTES = 4 << 20  # of a file that is sent
ARRIVING = ".receiving-"
LONGEST_TRANSFER = 86_400.0  # seconds; an older folder is a killed rank's


def prepare_data(settings: DataSettings, world: World, own: Dataset | Callable[[], Dataset] | None = None) -> Dataset:
    """The run's data set, the same files on every host; a collective.

    Rank 0 finds or makes the files. Each other host has the same ones, or is sent them.

    Args:
        own: the user's data set, or a function that every rank calls for it. None: the settings name a built-in set.

    Raises:
        UserError: on every rank, where one host cannot get the data, or hosts have different data.
    """
    if settings.image_size and not settings.dataset.startswith(fields.FOLDER_DATASET):
        raise UserError("--image-size goes with --dataset folder:PATH; give a data set of your own images of one size")
    if own is not None:
        return _own_dataset(own, settings)
    hosts, speaker = name_hosts(world)
    is_watched = terminal.is_watched()

    def onlooker(first: bool) -> Onlooker:
        """Hosts may decode images at the same time: only the first of them shows a progress bar."""
        told = Onlooker(is_watched and first, Watch.sign_of_life)
        return replace(told, is_warned=terminal.complain) if world.is_root else told

    def at_root() -> tuple[str, Path, Digests]:
        source, folder = prepare(settings, onlooker(True))
        files = source.files if len(hosts) > 1 else ()
        return source.name, folder, {name: digest_of(folder / name) for name in files}

    name, origin, digests = collectives.on_root(at_root)
    source = source_of(settings, name)

    def look() -> Path | None:
        if world.is_root or world.rank not in hosts:
            return origin if world.is_root else None
        is_first = list(hosts)[1] == world.rank
        return _find(source, digests, hosts[world.rank], onlooker(is_first))

    folder = collectives.on_every_rank(look)
    folders = collectives.all_gather_object(folder)
    if lacking := [host for rank, host in hosts.items() if folders[rank] is None]:
        receives = world.rank in hosts and folder is None
        folders = collectives.all_gather_object(_send(origin, source, digests, receives) or folder)
        if world.is_root:
            size = sum((origin / file).stat().st_size for file in digests) / 1e6
            terminal.say(f"{name} sent to {', '.join(lacking)}: {size:.0f} MB each, SHA-256 checked")
    here = folders[speaker]
    assert here is not None, "every host has the files, or received them"
    dataset = collectives.on_every_rank(lambda: source.read(here))
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


def _received(source: Source, digests: Digests) -> Path:
    """Where files belong that rank 0 has sent, and whose usual place is taken."""
    return source.data_dir / f"received-{hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12]}"


def _find(source: Source, expected: Digests, host: str, onlooker: Onlooker) -> Path | None:
    """The folder in which this host has rank 0's files; None: rank 0 is to send them. UserError where it has others."""
    folder, received = source.locate(onlooker), _received(source, expected)
    if folder and (other := _differing(folder, expected)):
        raise UserError(
            f"{host}: {other} is damaged or not rank 0's (its SHA-256 is another one): move {folder} away to have rank "
            "0's sent"
        )
    return folder or (None if _differing(received, expected) else received)


def _send(origin: Path, source: Source, digests: Digests, receives: bool) -> Path | None:
    """Broadcast rank 0's files. A rank that `receives` them returns their folder. A collective.

    No lock is held while files arrive: two jobs that wait for each other's locks would never end.
    """
    scratch = collectives.on_every_rank(lambda: _scratch(source.data_dir) if receives else None)
    try:
        for name in digests:
            start = 0
            while block := collectives.on_root(partial(_read, origin / name, start)):
                collectives.on_every_rank(partial(_append, scratch, name, block))
                Watch.sign_of_life()
                start += len(block)
        return collectives.on_every_rank(lambda: _put(scratch, source, digests) if scratch else None)
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _scratch(data_dir: Path) -> Path:
    """A new folder for files that arrive. Removes those of ranks that were killed."""
    with locked(data_dir):
        for left in data_dir.glob(f"{ARRIVING}*"):
            if time.time() - left.stat().st_mtime > LONGEST_TRANSFER:
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=ARRIVING, dir=data_dir))
        scratch.chmod(0o755)  # mkdtemp's is for its owner alone
        return scratch


def _read(path: Path, start: int) -> bytes:
    with searched(path.parent), open(path, "rb") as file:
        file.seek(start)
        return file.read(BLOCK_BYTES)


def _append(scratch: Path | None, name: str, block: bytes) -> None:
    if scratch:
        with written(scratch), open(scratch / name, "ab") as file:
            file.write(block)


def _put(scratch: Path, source: Source, digests: Digests) -> Path:
    """Move files that have arrived to the set's usual place, or to one of their own where that is taken."""
    if wrong := _differing(scratch, digests):
        raise UserError(f"{wrong.name} arrived damaged (its SHA-256 differs): start again")
    with locked(source.data_dir):
        usual = source.place
        place = usual if usual and (is_free(usual) or not _differing(usual, digests)) else _received(source, digests)
        if _differing(place, digests):  # else another process was faster, such as a host's that shares the folder
            shutil.rmtree(place, ignore_errors=True)
            os.rename(scratch, place)
        return place


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
