"""The faults of `python -m tests.mutation` are faults of the present code; and what its programs leave behind."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest

from tests.mutation.__main__ import main
from tests.mutation.faults import FAULTS, Fault
from tests.ranks import CHECKOUT, run_to_end


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.why)
def test_a_fault_has_one_place(fault: Fault) -> None:
    assert (CHECKOUT / fault.file).read_text().count(fault.old) == 1


def test_words_of_no_fault_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-word"]) == 2 and "no fault has no-such-word" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [True, False])
def test_a_program_leaves_nothing_behind(ends: bool, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' & "
    program += f"until [ -s {pid} ]; do sleep 0.1; done" if ends else "sleep 600"
    assert run_to_end(["sh", "-c", program], 60 if ends else 5) == (0 if ends else None)
    end = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(pid.read_text()))
        while left.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.05)
