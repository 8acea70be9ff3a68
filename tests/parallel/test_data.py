"""The same data on every host: real ranks, each of which is told that it is a host of its own, all of one name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks

SET = "synthetic-v1"


def _prepare(data_dirs: list[str], source: str) -> dict[str, Any]:
    """This rank's data set, where every rank is a host called "twin" with a data folder of its own."""
    from dataclasses import replace

    from hvd_cifar.config import DataSettings, make
    from hvd_cifar.errors import UserError
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.sources import prepare_data

    with session() as world:
        twin = replace(world, local_rank=0, local_size=1, host="twin")
        given = {"dataset": "synthetic", "data_dir": data_dirs[world.rank], "data_source": source}
        try:
            dataset = prepare_data(make(DataSettings, given), twin)
        except UserError as error:
            return {"error": str(error)}
        maps = Path("/proc/self/maps").read_text()
        mapped = [folder for folder in data_dirs if f"{folder}/" in maps]
        return {"digest": dataset.digest, "mapped": mapped}


@pytest.fixture(scope="module")
def spoilt(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the embedded set, but for one pixel."""
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / SET).mkdir()
    for path in (embedded / SET).iterdir():
        os.link(path, folder / SET / path.name)
    file = folder / SET / "data_batch_3.bin"
    content = bytearray(file.read_bytes())
    content[1234] ^= 1
    file.unlink()
    file.write_bytes(content)
    return folder


def test_local_sets_of_one_name_and_length_are_compared_by_their_bytes(embedded: Path, spoilt: Path) -> None:
    found = run_ranks(_prepare, 2, [str(embedded), str(spoilt)], "local")
    assert found[0] == found[1]
    assert "hosts have different data under the name synthetic (SHA-256 " in found[0]["error"]
    assert " on twin (rank 0); " in found[0]["error"] and " on twin (rank 1)): copy" in found[0]["error"]
    alike = run_ranks(_prepare, 2, [str(embedded), str(embedded)], "local")
    assert "error" not in alike[0] and alike[0] == alike[1]


def test_each_host_reads_its_own_files_also_where_hosts_share_a_name(embedded: Path, tmp_path: Path) -> None:
    places = [str(embedded), str(tmp_path / "of-rank-1")]
    found = run_ranks(_prepare, 2, places, "auto")
    assert found[0]["digest"] == found[1]["digest"]
    assert [of_rank["mapped"] for of_rank in found] == [[place] for place in places]


def _from_function(what: str) -> dict[str, Any]:
    from hvd_cifar.config import DataSettings, make
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.errors import UserError
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.sources import prepare_data

    with session() as world:

        def load() -> Any:
            images = np.zeros((4, 9, 9, 1), np.uint8)
            images[0, 0, 0, 0] = world.rank if what == "another image on rank 1" else 7
            if what == "an error on rank 1" and world.rank == 1:
                raise UserError("no file is there: make one")
            return None if what == "nothing" else Dataset.from_arrays(images, [0, 1, 2, 0], images, [0] * 4)

        try:
            dataset = prepare_data(make(DataSettings, {"dataset": "/sets/mine.py:load"}), world, load)
        except UserError as error:
            return {"error": str(error)}
        return {"name": dataset.name, "digest": dataset.digest}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another image on rank 1", "is not the same on all ranks (SHA-256 "),
        ("an error on rank 1", "no file is there: make one"),
        ("nothing", "mine.py:load is a NoneType: have the function return a hvd_cifar.Dataset"),
    ],
)
def test_a_function_that_is_wrong_on_a_rank_is_told_on_all(what: str, message: str) -> None:
    found = run_ranks(_from_function, 2, what)
    assert found[0] == found[1]
    assert message in found[0]["error"] and "\n" not in found[0]["error"]


def test_a_function_s_data_set_has_its_name() -> None:
    found = run_ranks(_from_function, 2, "the same")
    assert found[0] == found[1] and found[0]["name"] == "mine.py:load"
