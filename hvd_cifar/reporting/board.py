"""Event files of TensorBoard."""

from __future__ import annotations

import io
from pathlib import Path

import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from hvd_cifar.files import replace_bytes


class Board:
    """Scalars of a run over its steps.

    Raises:
        OSError, tf.errors.OpError: from every method, where a file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Write into `folder` after `first_step`; later events, which a run that was cut off has left, are removed."""
        for path in folder.glob("events.out.tfevents.*"):
            _drop_events_after(path, first_step)
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars of a step, by name; they are on disk when this returns."""
        with self._writer.as_default(step=step):  # which flushes at its end
            for name, value in scalars.items():
                tf.summary.scalar(name, value)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


def _drop_events_after(path: Path, step: int) -> None:
    """Rewrite an event file without events of later steps, where it holds any.

    TensorBoard marks a restart by a SessionLog START event, but its default loader does not read that event.
    """
    events = list(RawEventFileLoader(str(path)).Load())  # without an event that a killed run was writing
    kept = [event for event in events if Event.FromString(event).step <= step]
    if len(kept) == len(events):
        return
    content = io.BytesIO()
    for event in kept:
        RecordWriter(content).write(event)
    replace_bytes(path, content.getvalue())
