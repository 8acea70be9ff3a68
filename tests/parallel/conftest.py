"""What tests of several ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the embedded set, drawn once."""
    from hvd_cifar.data import synthetic

    folder = tmp_path_factory.mktemp("data")
    synthetic.ensure(folder)
    return folder
