"""What a rank's start imports and what it prints."""

import os
import subprocess
import sys

import pytest


def _run(program: str, level: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": level}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=True)


@pytest.mark.parametrize("level", ["0", "2"])
def test_the_start_does_not_import_plots_which_can_be_imported_later(level: str) -> None:
    program = """
import sys
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from hvd_cifar.training import loop
print("keras" in sys.modules, "matplotlib" in sys.modules)
from matplotlib import pyplot
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    pass
print(sys.modules["matplotlib"].pyplot is pyplot)
"""
    assert _run(program, level).stdout.split() == ["True", "False", "True"]


def test_notes_are_dropped_and_all_else_is_printed() -> None:
    program = """
import os
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from hvd_cifar.training import loop
    os.write(2, b"a library's warning\\n")
"""
    assert _run(program, "2").stderr == "a library's warning\n"
    assert "oneDNN custom operations are on" in _run(program, "0").stderr
