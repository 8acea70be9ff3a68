"""Event files of TensorBoard, without TensorFlow: its summaries as bytes that are added to a file."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hvd_cifar.files import replace_bytes


def begin(folder: Path, first_step: int) -> Path:
    """Make an event file in `folder` for what follows step `first_step`, and remove later events from earlier files."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("events.out.tfevents.*"):
        _drop_events_after(path, first_step)
    first = Event(wall_time=time.time(), file_version="brain.Event:2")
    # TensorBoard reads files of a folder in the order of their names.
    name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    (folder / name).write_bytes(_records([first.SerializeToString()]))
    return folder / name


def encode(step: int, values: Mapping[str, float]) -> bytes:
    """Numbers by tag as an event of a step: bytes to add to an event file."""
    summary = Summary(value=[value for tag, number in values.items() for value in scalar_pb(tag, number).value])
    return _records([Event(wall_time=time.time(), step=step, summary=summary).SerializeToString()])


def _records(events: Iterable[bytes]) -> bytes:
    content = io.BytesIO()
    for event in events:
        RecordWriter(content).write(event)
    return content.getvalue()


def _drop_events_after(path: Path, step: int) -> None:
    """Rewrite an event file without events of later steps, where it holds any.

    TensorBoard marks a restart by a SessionLog START event, but its default loader does not read that event.
    """
    events = list(RawEventFileLoader(str(path)).Load())  # without an incomplete last event of a killed run
    kept = [event for event in events if Event.FromString(event).step <= step]
    if len(kept) < len(events):
        replace_bytes(path, _records(kept))
