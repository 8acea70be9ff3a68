"""Event files of TensorBoard, without TensorFlow: its summaries as bytes that are added to a file."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from hvd_cifar.files import replace_bytes

BUCKETS = 30  # of a histogram, as TensorFlow's have
LARGEST = 1e300  # so that the distance of two values is finite


def begin(folder: Path, first_step: int) -> Path:
    """Make an event file in `folder` for what follows step `first_step`, and remove later events from earlier files.

    Raises:
        OSError: where a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    for path in folder.glob("events.out.tfevents.*"):
        _drop_events_after(path, first_step)
    # TensorBoard reads files of a folder in the order of their names.
    name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    (folder / name).write_bytes(_records([Event(wall_time=time.time(), file_version="brain.Event:2")]))
    return folder / name


def encode(step: int, summaries: Iterable[Any] = (), graph: bytes | None = None) -> bytes:
    """Summaries, and a serialised GraphDef, as events of a step: bytes to add to an event file."""
    events = [Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries]
    events += [Event(wall_time=time.time(), step=step, graph_def=graph)] if graph else []
    return _records(events)


def _records(events: Iterable[Any]) -> bytes:
    content = io.BytesIO()
    for event in events:
        RecordWriter(content).write(event.SerializeToString())
    return content.getvalue()


def scalars(values: Mapping[str, float]) -> Any:
    """A Summary of numbers by tag."""
    return Summary(value=[value for tag, number in values.items() for value in scalar_pb(tag, number).value])


def histogram(values: NDArray[Any]) -> NDArray[np.float64]:
    """[30, 3]: the left and right end of each bucket, and how many of the finite `values`, of any shape, it holds."""
    flat = values.ravel().astype(np.float64)
    flat = np.clip(flat[np.isfinite(flat)], -LARGEST, LARGEST)
    if flat.size == 0:
        return np.zeros((BUCKETS, 3))
    low, high = flat.min(), flat.max()
    least = 2 * BUCKETS * np.spacing(max(-low, high))
    if high - low < least:  # NumPy refuses buckets whose ends are no distinct numbers
        low, high = low - max(0.5, least), high + max(0.5, least)
    counts, edges = np.histogram(flat, BUCKETS, (low, high))
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def histograms(buckets: Mapping[str, NDArray[np.float64]]) -> Any:
    """A Summary of `histogram`s by tag. TensorBoard's own `histogram_pb` compares each value with each bucket."""
    metadata = histogram_metadata.create_summary_metadata(None, None)
    return Summary(
        value=[
            Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(found, dtype=np.float64))
            for tag, found in buckets.items()
        ]
    )


def images(pixels: Mapping[str, NDArray[np.uint8]], description: str) -> Any:
    """A Summary of an image by tag: uint8 [height, width, 1 or 3], described in Markdown."""
    metadata = image_metadata.create_summary_metadata(None, description)
    return Summary(
        value=[Summary.Value(tag=tag, metadata=metadata, tensor=_png(array)) for tag, array in pixels.items()]
    )


def _png(array: NDArray[np.uint8]) -> Any:
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(file, "PNG")
    height, width = (str(size).encode() for size in array.shape[:2])
    return make_tensor_proto([width, height, file.getvalue()])


def _drop_events_after(path: Path, step: int) -> None:
    """Rewrite an event file without events of later steps, where it holds any.

    TensorBoard marks a restart by a SessionLog START event, but its default loader does not read that event.
    """
    events = list(RawEventFileLoader(str(path)).Load())  # without an incomplete last event of a killed run
    kept = [event for event in events if Event.FromString(event).step <= step]
    if len(kept) == len(events):
        return
    content = io.BytesIO()
    for event in kept:
        RecordWriter(content).write(event)
    replace_bytes(path, content.getvalue())
