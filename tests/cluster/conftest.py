"""Clusters of namespaces for the tests here: made when first asked for, skipped where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Cluster, cluster, reason_to_skip


@pytest.fixture(scope="module")
def need_hosts() -> None:
    """Skip where no hosts can be made."""
    if reason := reason_to_skip():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def two_hosts(need_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts for all tests of a module: leave them as they were."""
    with cluster(2, tmp_path_factory.mktemp("two") / "cluster") as made:
        yield made


@pytest.fixture(scope="module")
def three_hosts(need_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts for all tests of a module: leave them as they were."""
    with cluster(3, tmp_path_factory.mktemp("three") / "cluster") as made:
        yield made
