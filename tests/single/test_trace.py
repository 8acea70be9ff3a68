"""Clocks, hidden time and the room of a trace, as pure functions; the options of --profile-steps."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_cifar.config import TrainSettings, make
from hvd_cifar.distributed import clocks
from hvd_cifar.distributed.clocks import Comparison
from hvd_cifar.errors import UserError
from hvd_cifar.extensions import profile
from hvd_cifar.reporting import trace
from hvd_cifar.reporting.trace import Event, Message


def test_clocks_between_barriers() -> None:
    # True offset 1000. In the second barrier neither rank waits long; in the others one is late, or interrupted.
    root = [(0, 90), (100, 110), (200, 290)]
    own = [(1080, 1095), (1102, 1112), (1205, 1400)]
    ahead, uncertainty = clocks.between(own, root)
    assert (ahead, uncertainty) == (1002, 11) and abs(ahead - 1000) <= uncertainty
    assert clocks.between(root, root) == (0, 0)


def test_drift_between_two_comparisons() -> None:
    first, last = Comparison(1_000, 500, 1), Comparison(11_000, 600, 1)
    assert [clocks.on_root(when, first, last) for when in (1_000, 6_000, 11_000)] == [500, 5_450, 10_400]


def test_a_message_begins_when_all_ranks_have_given_it() -> None:
    early, late = Message(1, ("a", 0), 10, 10, 50), Message(1, ("a", 0), 30, 30, 52)
    assert trace.begun([early], [[early], [late]]) == [early._replace(begin=30)]
    assert trace.begun([late], [[early], [late]]) == [late]
    # Of another step, and after the sum: clocks agree only so far.
    assert trace.begun([early], [[early, early._replace(step=2, given=40)]]) == [early]
    assert trace.begun([early], [[late._replace(given=60)]])[0].begin == 50


def test_hidden_time() -> None:
    messages = [Message(1, ("a", 0), 5, 10, 30), Message(1, ("b", 0), 20, 20, 50), Message(1, ("c", 0), 40, 45, 60)]
    computing = [(0, 15), (12, 25), (35, 100)]
    # In flight from 10 to 60; the last message is given at 40; until then 10 to 25 and 35 to 40 are computed.
    assert trace.hidden(messages, computing) == (20, 50)
    assert trace.hidden(messages, []) == (0, 50) and trace.hidden([], computing) == (0, 0)
    # A step whose only message is given at its end hides nothing.
    assert trace.hidden([Message(2, ("a", 0), 110, 110, 120)], [(0, 200)]) == (0, 10)


def test_the_shortest_events_are_left_out() -> None:
    steps = [Event("steps", "step 1", 0, 1000)]
    rest = [Event("1 a", f"for {length}", 100 * length, 100 * length + length) for length in range(1, 10)]
    text, left_out = trace.as_json(3, "b", steps, rest, 0, 4)
    names = [event["name"] for event in json.loads(f"[{text}]") if event["ph"] == "X"]
    assert names == ["step 1", "for 6", "for 7", "for 8", "for 9"] and left_out == 5
    assert trace.as_json(3, "b", steps, rest, 0, 9)[1] == 0


def test_what_is_said() -> None:
    rank = {"clock_uncertainty_seconds": 2e-4, "events_left_out": 0}
    ranks = [{**rank, "hidden_and_communication_seconds": times} for times in ([1.0, 2.0], [0.0, 2.0])]
    said = "25% of the communication is hidden behind backward (0% to 50% on 2 ranks); clocks agree to 0.20 ms"
    assert profile.in_words(ranks) == said
    ranks[0].update(events_left_out=3)
    assert "; the 3 shortest events are left out" in profile.in_words(ranks)
    assert profile.in_words([{**rank, "hidden_and_communication_seconds": [0.0, 0.0]}]).startswith("no communication; ")


@pytest.mark.parametrize("given", ["110:100", "x", "0:3", "5", "-1:2", "1:2:3", "1:101", [3], ["a", 2]])
def test_wrong_windows(given: Any) -> None:
    with pytest.raises(UserError, match="^--profile-steps ") as failure:
        make(TrainSettings, {"profile_steps": given})
    assert "\n" not in str(failure.value)


def test_a_profile_that_is_left_out_is_told() -> None:
    told: list[tuple[str, int]] = []
    run: Any = SimpleNamespace(step=7, total_steps=109, warn=lambda line, step: told.append((line, step)))
    for profiler in (profile.Profiler((7, 9)), profile.Profiler((9, 10))):
        profiler.on_build(run)
        profiler.on_start(run)
        profiler.on_end(run)
    whys = ("7:9: no profile: the run goes on after step 7", "9:10: no profile: the run ended after step 7")
    assert told == [(f"--profile-steps {why}", 7) for why in whys]
    with pytest.raises(UserError, match="--profile-steps 100:110: the run ends after step 109"):
        profile.Profiler((100, 110)).on_build(run)


def test_windows() -> None:
    for given, steps in (("100:110", (100, 110)), ([7, 7], (7, 7))):
        assert make(profile.Settings, {"profile_steps": given}).profile_steps == steps
        assert make(TrainSettings, {"profile_steps": given}).model_dump()["profile_steps"] == steps
