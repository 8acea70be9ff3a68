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
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from hvd_cifar.files import replace_bytes

MOST_VALUES = 2**20  # of a histogram: TensorBoard compares each with each bucket


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


def encode(step: int, summaries: Iterable[Any] = (), graph: bytes | None = None) -> bytes:
    """Summaries, and a serialised GraphDef, as events of a step: bytes to add to an event file."""
    events = [Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries]
    events += [Event(wall_time=time.time(), step=step, graph_def=graph)] if graph else []
    return _records(event.SerializeToString() for event in events)


def _records(events: Iterable[bytes]) -> bytes:
    content = io.BytesIO()
    for event in events:
        RecordWriter(content).write(event)
    return content.getvalue()


def scalars(values: Mapping[str, float]) -> Any:
    """A Summary of numbers by tag."""
    return Summary(value=[value for tag, number in values.items() for value in scalar_pb(tag, number).value])


def histograms(values: Mapping[str, NDArray[Any]]) -> Any:
    """A Summary of histograms by tag: of finite values, and where there are very many of a part of them."""
    finite = {tag: array[np.isfinite(array)] for tag, array in values.items()}
    found = (histogram_pb(tag, array[:: 1 + array.size // MOST_VALUES]) for tag, array in finite.items())
    return Summary(value=[value for summary in found for value in summary.value])


def images(pixels: Mapping[str, NDArray[np.uint8]], description: str) -> Any:
    """A Summary of an image by tag: uint8 [height, width, 1 or 3], described in Markdown."""
    about = image_metadata.create_summary_metadata(None, description)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=_png(p)) for tag, p in pixels.items()])


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
    if len(kept) < len(events):
        replace_bytes(path, _records(kept))
