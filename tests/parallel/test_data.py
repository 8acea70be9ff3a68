"""The same data on every host: real ranks, each of which is told that it is a host of its own, all of one name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

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


def _from_folder(images: str, data_dirs: list[str]) -> list[Any]:
    """Twice this rank's data set of a folder that only rank 0's host has."""
    from dataclasses import replace

    from hvd_cifar.config import DataSettings, make
    from hvd_cifar.data.folder import Folder
    from hvd_cifar.reporting import terminal
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.sources import prepare_data

    with session() as world:
        twin = replace(world, local_rank=0, local_size=1, host="twin")
        settings = make(DataSettings, {"dataset": f"folder:{images}", "data_dir": data_dirs[world.rank]})
        if world.rank == 1:
            Folder.locate = lambda self: None  # type: ignore[method-assign]
        said: list[str] = []
        vars(terminal)["say"] = said.append
        found = [prepare_data(settings, twin) for _ in range(2)]
        maps = Path("/proc/self/maps").read_text()
        return [found[0].digest, found[1].digest, found[1].class_names, f"{data_dirs[1]}/received-" in maps, said]


def test_a_host_without_the_folder_is_sent_the_decoded_images(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for label, name in enumerate(("ant", "bee")):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((9, 8, 3), 50 * label + i, np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / name / f"{i}.png")
    places = [str(tmp_path / name) for name in ("of-rank-0", "of-rank-1")]
    one, other = run_ranks(_from_folder, 2, str(tmp_path / "images"), places)
    assert one[:3] == other[:3] and one[0] == one[1] and one[2] == ["ant", "bee"]
    assert [one[3], other[3]] == [False, True]
    assert one[4] == [f"folder:{tmp_path}/images sent to twin (rank 1): 0 MB each, SHA-256 checked"]  # once
    assert not Path(places[0]).exists()  # beside the images is enough
    assert [path.name[:9] for path in Path(places[1]).iterdir() if path.is_dir()] == ["received-"]


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


def _resumed_on_other_data(folder: str) -> dict[str, str]:
    """What a run says that goes on with its own data, and with data that differ in one place, by what differs."""
    import keras

    import hvd_cifar
    from hvd_cifar.errors import UserError

    def net(image_shape: tuple[int, int, int], classes: int) -> Any:
        images = keras.Input(image_shape)
        return keras.Model(images, keras.layers.Dense(classes)(keras.layers.Flatten()(images)))

    def data(changed: str) -> hvd_cifar.Dataset:
        generator = np.random.default_rng(3)
        images, labels = generator.integers(0, 256, (20, 8, 8, 3)).astype(np.uint8), np.arange(20) % 3
        images[7, 1, 2, 0] ^= changed == "pixel"
        labels[7] = (labels[7] + (changed == "label")) % 3
        return hvd_cifar.Dataset.from_arrays(images, labels, images[:4], [0, 1, 2, 0])

    told = {}
    for step, changed in enumerate(["nothing", "pixel", "label", "nothing, again"], start=1):
        try:
            course: dict[str, Any] = {"global_batch_size": 4, "eval_every": 0, "run_dir": folder}
            summary = hvd_cifar.train(net, data(changed), max_steps=step, **course)
            told[changed] = f"step {summary['steps']}"
        except UserError as error:
            told[changed] = str(error)
    return told


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    (told,) = run_ranks(_resumed_on_other_data, 1, str(tmp_path / "run"), launcher="none")
    assert told["nothing"] == "step 1" and told["nothing, again"] == "step 4"
    for changed in ("pixel", "label"):
        assert "has other settings (examples sha256 was " in told[changed], told[changed]
