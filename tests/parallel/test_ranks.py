"""What ranks know of each other after the start of a session."""

from __future__ import annotations

from typing import Any

from tests.ranks import run_ranks


def _sessions() -> list[Any]:
    import os

    from hvd_cifar.runtime.watch import Watch
    from hvd_cifar.runtime.world import session

    watch = Watch(60)
    with session(threads=1 + int(os.environ["OMPI_COMM_WORLD_RANK"]), watch=watch) as world:
        known = [repr(facts) for facts in world.ranks]
        places = [(facts.host == world.host, facts.first, facts.threads) for facts in world.ranks]
        joined = watch.peers
    return [known, places, joined]


def test_facts_are_the_same_on_all_ranks_and_watchdogs_know_each_other() -> None:
    found = run_ranks(_sessions, 2, fresh=True)
    assert found[0][0] == found[1][0] and len(found[0][0]) == 2
    for _, places, joined in found:
        assert places == [[True, 0, 1], [True, 0, 2]]
        assert len(joined) == 2
