"""What ranks know of each other after the start of a session."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.ranks import run_ranks


def _sessions() -> list[Any]:
    import os

    from hvd_cifar.runtime.watch import Peer, Watch
    from hvd_cifar.runtime.world import session

    watch = Watch(60)
    with session(threads=1 + int(os.environ["OMPI_COMM_WORLD_RANK"]), watch=watch) as world:
        known = [repr(facts) for facts in world.ranks]
        places = [(facts.host == world.host, facts.local_rank, facts.threads) for facts in world.ranks]
        joined = watch.peers
    nowhere = lambda watch, rank, one_host: Peer("a", 1, ("127.0.0.1", 1))  # noqa: E731
    with mock.patch.object(Watch, "listen", nowhere), session(watch=(unreached := Watch(60))):
        alone = unreached.peers
    return [known, places, joined, alone]


def test_facts_are_the_same_on_all_ranks_and_watchdogs_reach_each_other_or_judge_alone() -> None:
    found = run_ranks(_sessions, 2, fresh=True)
    assert found[0][0] == found[1][0] and len(found[0][0]) == 2
    for _, places, joined, alone in found:
        assert places == [[True, 0, 1], [True, 1, 2]]
        assert len(joined) == 2 and alone == []
