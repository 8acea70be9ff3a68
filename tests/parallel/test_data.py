"""The same data on every host: real ranks, each of which is told that it is a host of its own, all of one name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.ranks import run_ranks

SET = "synthetic-v2"
WRONG = ["another image on rank 1", "an error on rank 1", "nothing"]


def _all(embedded: str, spoilt: str, empty: str, images: str) -> dict[str, Any]:
    """What this rank gets in every case below, by case, all in one start of the ranks."""
    from dataclasses import replace

    from hvd_cifar.config import DataSettings, make
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.data.folder import Folder
    from hvd_cifar.data.host_files import Onlooker
    from hvd_cifar.errors import UserError
    from hvd_cifar.reporting import terminal
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training import sources
    from hvd_cifar.training.sources import prepare_data

    with session() as world:
        ranks = tuple(replace(facts, host="twin", first=rank) for rank, facts in enumerate(world.ranks))
        twin = replace(world, local_rank=0, local_size=1, first=world.rank, host="twin", ranks=ranks)

        def prepared(given: dict[str, str], load: Any = None) -> dict[str, Any]:
            said: list[str] = []
            vars(terminal)["say"] = said.append
            try:
                dataset = prepare_data(make(DataSettings, given), twin if load is None else world, load)
            except UserError as error:
                return {"error": str(error)}
            opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
            read = [folder for folder in (embedded, empty) if any(f"{folder}/" in path for path in opened)]
            about = [dataset.name, dataset.digest, list(dataset.class_names)]
            return {"about": about, "read": read, "said": said}

        def of_synthetic(*folders: str) -> dict[str, Any]:
            return prepared({"dataset": "synthetic", "data_dir": folders[world.rank]})

        def of_function(what: str) -> dict[str, Any]:
            def load() -> Any:
                pixels = np.zeros((4, 9, 9, 1), np.uint8)
                pixels[0, 0, 0, 0] = world.rank if what == "another image on rank 1" else 7
                if what == "an error on rank 1" and world.rank == 1:
                    raise UserError("no file is there: make one")
                return None if what == "nothing" else Dataset.from_arrays(pixels, [0, 1, 2, 0], pixels, [0] * 4)

            return prepared({"dataset": "/sets/mine.py:load"}, load)

        def of_folder() -> dict[str, Any]:
            return prepared({"dataset": f"folder:{images}", "data_dir": f"{empty}/of-rank-{world.rank}"})

        found = {
            "sent": of_synthetic(embedded, empty),
            "other data": of_synthetic(embedded, spoilt),
            "the same": of_synthetic(embedded, embedded),
            **{what: of_function(what) for what in [*WRONG, "right"]},
        }
        shown: list[str] = []

        def locate(folder: Folder, data_dir: Path, onlooker: Onlooker) -> Path | None:
            onlooker.is_shown("progress")
            return None  # rank 1's host has no such folder

        vars(sources)["complain"] = shown.append
        setattr(Folder, "locate", locate)  # noqa: B010
        return {**found, "folder, sent": of_folder(), "shown": shown.copy(), "folder, there": of_folder()}


@pytest.fixture(scope="module")
def cases(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What both ranks got, and the folder of it all."""
    place = tmp_path_factory.mktemp("data")
    (place / "spoilt" / SET).mkdir(parents=True)
    for path in (embedded / SET).iterdir():
        os.link(path, place / "spoilt" / SET / path.name)
    file = place / "spoilt" / SET / "data_batch_3.bin"
    content = bytearray(file.read_bytes())
    content[1234] ^= 1  # one pixel
    file.unlink()
    file.write_bytes(content)
    for part in ("train", "val"):
        for label, name in enumerate(("ant", "bee")):
            (place / "images" / part / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((9, 8, 3), 50 * label + i, np.uint8)
                Image.fromarray(pixels).save(place / "images" / part / name / f"{i}.png")
    folders = [str(embedded), *(str(place / name) for name in ("spoilt", "empty", "images"))]
    return run_ranks(_all, 2, *folders, fresh=True), place


Cases = tuple[list[dict[str, Any]], Path]


def test_sets_of_one_name_and_length_are_compared_by_their_bytes(cases: Cases) -> None:
    one, other = (of_rank["other data"] for of_rank in cases[0])
    assert one == other
    spoilt = cases[1] / "spoilt" / SET
    assert one["error"].startswith(f"twin (rank 1): {spoilt}/data_batch_3.bin is damaged or not rank 0's (its SHA-256")
    assert f"move {spoilt} away" in one["error"]
    one, other = (of_rank["the same"] for of_rank in cases[0])
    assert "error" not in one and one["about"] == other["about"]


def test_each_host_reads_its_own_files_also_where_hosts_share_a_name(embedded: Path, cases: Cases) -> None:
    one, other = (of_rank["sent"] for of_rank in cases[0])
    assert one["about"] == other["about"]
    assert [one["read"], other["read"]] == [[str(embedded)], [str(cases[1] / "empty")]]
    assert one["said"] == ["synthetic sent to twin (rank 1): 157 MB each, SHA-256 checked"]


def test_a_host_without_the_folder_is_sent_the_decoded_images_once(cases: Cases) -> None:
    by_rank, place = cases
    for case in ("folder, sent", "folder, there"):
        assert by_rank[0][case]["about"] == by_rank[1][case]["about"]
        assert by_rank[0][case]["about"][2] == ["ant", "bee"]
    assert by_rank[0]["folder, sent"]["said"] == [
        f"folder:{place}/images sent to twin (rank 1): 0 MB each, SHA-256 checked"
    ]
    assert by_rank[0]["folder, there"]["said"] == []
    assert not (place / "empty" / "of-rank-0").exists()  # beside the images is enough
    assert [of_rank["shown"] for of_rank in by_rank] == [[], ["progress"]]  # of the first host besides rank 0's
    received = [path.name[:9] for path in (place / "empty" / "of-rank-1").iterdir() if path.is_dir()]
    assert received == ["received-"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another image on rank 1", "is not the same on all ranks (SHA-256 "),
        ("an error on rank 1", "no file is there: make one"),
        ("nothing", "mine.py:load is a NoneType: have the function return a hvd_cifar.Dataset"),
    ],
)
def test_a_function_that_is_wrong_on_a_rank_is_told_on_all(cases: Cases, what: str, message: str) -> None:
    one, other = (of_rank[what] for of_rank in cases[0])
    assert one == other
    assert message in one["error"] and "\n" not in one["error"]


def test_a_function_s_data_set_has_its_name(cases: Cases) -> None:
    one, other = (of_rank["right"] for of_rank in cases[0])
    assert one["about"] == other["about"] and one["about"][0] == "mine.py:load"
