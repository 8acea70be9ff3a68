"""Readers of files: any bytes give a value or a UserError, in bounded time. `python -m tests.fuzz` looks deeper."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import __main__ as command
from tests.fuzz.readers import CORPUS, READERS, read

SECONDS = 10  # a generous limit for one input


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name[:20]}")
def test_what_was_found_stays_fixed(path: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    read(path.parent.name, path.read_bytes(), tmp_path)
    assert time.monotonic() - begin < SECONDS


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=SECONDS * 1000, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_are_a_value_or_a_user_error(name: str, data: st.DataObject) -> None:
    """Bytes of any kind, and seeds with some bytes changed, removed or repeated."""
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    content = data.draw(st.binary(max_size=500) | st.text(max_size=200).map(str.encode) | st.sampled_from(seeds))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content)))
        until = min(len(content), at + data.draw(st.integers(0, 8)))
        content = content[:at] + data.draw(st.binary(max_size=8)) * data.draw(st.integers(0, 50)) + content[until:]
    with tempfile.TemporaryDirectory() as place:
        read(name, content, Path(place))


def test_every_reader_is_fuzzed_and_has_a_seed() -> None:
    assert list(READERS) == command.NAMES
    assert {path.parent.name for path in CORPUS.glob("*/*")} == set(READERS)
