"""The faults of `python -m tests.mutation` are faults of the present code."""

from __future__ import annotations

import pytest

from tests.mutation.faults import FAULTS, Fault
from tests.ranks import CHECKOUT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.why)
def test_a_fault_has_one_place(fault: Fault) -> None:
    assert (CHECKOUT / fault.file).read_text().count(fault.old) == 1
