"""Which rank speaks for which host, and how hosts with different data are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_cifar import config
from hvd_cifar.data.place import NOBODY
from hvd_cifar.data.source import source_of
from hvd_cifar.errors import UserError
from hvd_cifar.training.sources import _own_folder, _place, differences, speakers


def _ranks(*hosts: tuple[str, int], in_turn: bool = False) -> tuple[list[tuple[str, int, int]], list[int]]:
    """Ranks of these hosts (name, slots) as a launcher numbers them, and the speaker of each."""
    places = [(host, local) for host, (_, slots) in enumerate(hosts) for local in range(slots)]
    if in_turn:
        places.sort(key=lambda place: (place[1], place[0]))
    ranks = [(*hosts[host][:1], local, hosts[host][1]) for host, local in places]
    return ranks, [places.index((host, 0)) for host, _ in places]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(
    "hosts",
    [
        [("a", 1)],
        [("a", 4)],
        [("a", 2), ("b", 2)],
        [("a", 2), ("a", 2)],
        [("a", 3), ("b", 1), ("a", 2)],
        [("a", 1), ("a", 3), ("a", 2), ("b", 3)],
    ],
)
def test_every_host_has_a_speaker_also_where_names_repeat(hosts: list[tuple[str, int]], in_turn: bool) -> None:
    ranks, expected = _ranks(*hosts, in_turn=in_turn)
    assert speakers(ranks) == expected


def test_hosts_with_different_data_are_named_in_the_order_of_the_ranks() -> None:
    assert differences([("a", "x"), ("b", "x")]) == ""
    assert differences([("c", "y"), ("a", "x"), ("b", "y")]) == "y on c, b; x on a"
    many = [(f"n{i}", "x") for i in range(64)]
    assert differences([*many, ("odd", "y")]) == "x on n0, n1, n2, n3 and 60 more; y on odd"


@pytest.mark.parametrize("name", ["auto", "cifar10", "cifar100", "synthetic", "folder:/a/b", "/a/b.py:load", "a.b:c"])
def test_names_of_data_sets(name: str) -> None:
    assert config.make(config.DataSettings, {"dataset": name}).dataset == name


def test_paths_in_names_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    for given, expected in (
        ("folder:images", f"folder:{tmp_path}/images"),
        ("folder:~/images", "folder:/home/me/images"),
        ("sets/mine.py:load", f"{tmp_path}/sets/mine.py:load"),
        ("~/mine.py:load", "/home/me/mine.py:load"),
    ):
        assert config.make(config.DataSettings, {"dataset": given}).dataset == expected
        assert config.make(config.EvaluateSettings, {"run_dir": "r", "dataset": given}).dataset == expected


@pytest.mark.parametrize(
    "name", ["cifra10", "", "cifar-10", "folder:", "mine.py:", "mine.py:1", "mine.py", "a b:c", ":c"]
)
def test_what_is_no_name_of_a_data_set_is_told_what_there_is(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--dataset {name}: ")) as caught:
        config.make(config.TrainSettings, {"dataset": name})
    message = str(caught.value)
    assert "\n" not in message and "folder:PATH" in message
    if name != "folder:":
        assert "auto, cifar10, cifar100, synthetic, folder:PATH, FILE.py:NAME or package.module:NAME" in message


def test_a_data_folder_that_cannot_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this host would look for what it has received, or put it."""
    long = tmp_path / ("x" * 300)
    settings = config.make(config.DataSettings, {"dataset": f"folder:{tmp_path}/none", "data_dir": long})
    with pytest.raises(UserError, match=f"cannot read {long}/received-.*: File name too long"):
        _own_folder(source_of(settings.dataset, settings), settings, {}, "host", NOBODY)
    source = source_of("cifar10", config.make(config.DataSettings, {"data_dir": tmp_path}))
    (tmp_path / "cifar-10-batches-bin").mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=f"cannot read {tmp_path}/cifar-10-batches-bin: Permission denied"):
        _place(source, tmp_path, {})


@pytest.mark.parametrize("source", ["auto", "rank0"])
def test_rank_0_s_set_takes_the_place_of_a_damaged_folder_where_it_is_asked_for(source: str, tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()  # a mount without its disk
    values = {"dataset": f"folder:{tmp_path}/birds", "data_dir": tmp_path / "data", "data_source": source}
    settings = config.make(config.TrainSettings, values)
    if source == "rank0":
        assert _own_folder(source_of(settings.dataset, settings), settings, {}, "host", NOBODY) is None
        return
    with pytest.raises(UserError, match="birds: it has no folder test or val"):
        _own_folder(source_of(settings.dataset, settings), settings, {}, "host", NOBODY)
