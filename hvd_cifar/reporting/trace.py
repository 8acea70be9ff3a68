"""What TensorFlow's profiler saw on a rank, as events of a trace. Pure functions; times are in nanoseconds."""

from __future__ import annotations

import json
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import count
from typing import Any, NamedTuple

from tensorflow.tsl.profiler.protobuf import xplane_pb2

GIVEN, BACK = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
COMPUTING = "ExecutorState::Process"
HOROVOD = "Horovod"  # the start of its kernels' names: HorovodAllreduce, in a fixed order HorovodAlltoall and others
DATA_THREADS = "tf_data"  # the start of their names


class Event(NamedTuple):
    """What a thread does from one time to another; `lane` is a row of the trace."""

    lane: str
    name: str
    begin: int
    end: int


class Message(NamedTuple):
    """What a rank gives Horovod in a step, to be reduced or moved.

    key: its operation's name, and its number among those of that name in the step; the same on all ranks.
    given: this rank has handed it to Horovod. begin: all ranks have. back: this rank has the result.
    """

    step: int
    key: tuple[str, int]
    given: int
    begin: int
    back: int


class Seen(NamedTuple):
    """What one rank's file holds.

    messages: their `begin` is `given` until `begun` corrects it. computing: when operations ran, also of other steps.
    """

    events: list[Event]
    messages: list[Message]
    computing: list[tuple[int, int]]


def read(content: bytes, on_root: Callable[[int], int], edges: Sequence[int], first_step: int) -> Seen:
    """What a file of TensorFlow's profiler (xplane.pb) says of some steps.

    Args:
        content: of the file.
        on_root: gives the common time of one of this rank's clock.
        edges: common times at which the steps begin, and the last one ends.
        first_step: number of the first.
    """
    space = xplane_pb2.XSpace.FromString(content)
    origin = {key: value for plane in space.planes for key, value in _stats(plane, plane)}["profile_start_time"]
    events, computing = [], []
    given: dict[int, tuple[str, int]] = {}  # by the number that an operation's start and end share
    back: dict[int, int] = {}
    number = count(1)
    for plane in space.planes:
        for line in plane.lines:
            lane = f"{next(number)} {line.name or plane.name}"
            for found in line.events:
                name = plane.event_metadata[found.metadata_id].name
                start = origin + line.timestamp_ns + found.offset_ps // 1000
                begin, end = on_root(start), on_root(start + found.duration_ps // 1000)
                if end < edges[0] or begin > edges[-1]:
                    continue
                events.append(Event(lane, name, begin, end))
                if name == COMPUTING and not line.name.startswith(DATA_THREADS):
                    computing.append((begin, end))
                if name in (GIVEN, BACK):
                    stats = dict(_stats(plane, found))
                    if name == BACK:
                        back[stats["_c"]] = begin
                    elif stats["kernel_type"].startswith(HOROVOD):
                        given[stats["_p"]] = stats["name"], begin
    messages, seen = [], defaultdict[tuple[int, str], int](int)
    for flow, (name, when) in sorted(given.items(), key=lambda item: item[1][1]):
        step = bisect(edges, when) - 1
        if flow in back and 0 <= step < len(edges) - 1:
            key = name, seen[step, name]
            seen[step, name] += 1
            messages.append(Message(first_step + step, key, when, when, back[flow]))
    return Seen(events, messages, computing)


def _stats(plane: Any, of: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that the file has of a plane or an event of it."""
    for stat in of.stats:
        kind = stat.WhichOneof("value")
        value = plane.stat_metadata[stat.ref_value].name if kind == "ref_value" else getattr(stat, kind)
        yield plane.stat_metadata[stat.metadata_id].name, value


def begun(own: Sequence[Message], by_rank: Iterable[Sequence[Message]]) -> list[Message]:
    """A rank's messages with their `begin`: the latest time at which a rank gave its own."""
    latest: dict[Any, int] = {}
    for messages in by_rank:
        for m in messages:
            latest[m.step, m.key] = max(latest.get((m.step, m.key), m.given), m.given)
    # Horovod returns no result before all ranks have given. Where one seems earlier, the clocks are inexact.
    return [m._replace(begin=max(m.given, min(latest[m.step, m.key], m.back))) for m in own]


def hidden(messages: Sequence[Message], computing: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The time of a rank's communication that its computation of gradients hides, and all time of communication.

    A message is on its way from the time at which the last rank gives it until its result is back on this rank. The
    computation of gradients ends in each step when this rank gives the step's last message.
    """
    last = last_given(messages)
    in_flight = [(m.begin, m.back) for m in messages]
    before_last = [(m.begin, min(m.back, last[m.step])) for m in messages if m.begin < last[m.step]]
    return _in_both(before_last, computing), _in_both(in_flight, in_flight)


def last_given(messages: Iterable[Message]) -> dict[int, int]:
    """When a rank gives the last message of each step."""
    last: dict[int, int] = {}
    for m in messages:
        last[m.step] = max(last.get(m.step, m.given), m.given)
    return last


def _in_both(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> int:
    """The time within a span of each; spans may overlap."""
    edges = sorted(
        (when, change, which)
        for which, spans in enumerate((one, other))
        for span in spans
        for when, change in zip(span, (1, -1), strict=True)
    )
    open_spans, total, before = [0, 0], 0, 0
    for when, change, which in edges:
        total += when - before if all(open_spans) else 0
        open_spans[which] += change
        before = when
    return total


def lanes_of(messages: Sequence[Message], edges: Sequence[int], first_step: int) -> list[Event]:
    """A rank's steps, the computation of their gradients, and their messages, as events."""
    last = last_given(messages)
    found = []
    for step, (begin, end) in enumerate(zip(edges, edges[1:], strict=False), start=first_step):
        found.append(Event("steps", f"step {step}", begin, end))
        if step in last:
            found.append(Event("gradients", "to the last gradient", begin, last[step]))
        # Messages overlap: each of a step has a lane of its own.
        for place, m in enumerate((m for m in messages if m.step == step), start=1):
            lane = f"message {place}"
            found.append(Event(lane, m.key[0], m.given, m.back))
            found += [Event(lane, "wait for the other ranks", m.given, m.begin)] if m.begin > m.given else []
    return found


def as_json(
    rank: int, host: str, first: Sequence[Event], rest: Sequence[Event], zero: int, most: int
) -> tuple[str, int]:
    """A rank's events in the format of Chrome's traces, with commas between them; and how many are left out.

    Args:
        rank, host: name the process.
        first: events that are kept.
        rest: others, of which the longest `most` are kept.
        zero: the time that the trace begins at.
    """
    kept = [*first, *nlargest(most, rest, key=lambda event: event.end - event.begin)]
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(event.lane for event in kept))}
    texts = [_meta("process", rank, 0, f"rank {rank} on {host}", rank)]
    texts += [_meta("thread", rank, number, lane, number) for lane, number in lanes.items()]
    for event in sorted(kept, key=lambda event: (event.begin, -event.end)):
        times = {"ts": (event.begin - zero) / 1000, "dur": (event.end - event.begin) / 1000}
        texts.append(json.dumps({"ph": "X", "name": event.name, "pid": rank, "tid": lanes[event.lane], **times}))
    return ",\n".join(texts), len(first) + len(rest) - len(kept)


def _meta(kind: str, rank: int, lane: int, name: str, place: int) -> str:
    """The name and the place of a process or a thread."""
    args = {f"{kind}_name": {"name": name}, f"{kind}_sort_index": {"sort_index": place}}
    return ",\n".join(
        json.dumps({"ph": "M", "name": what, "pid": rank, "tid": lane, "args": values}) for what, values in args.items()
    )
