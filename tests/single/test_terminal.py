"""Standard streams that are closed, full or without a reader do not end a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, sys
from hvd_cifar.files import complain
from hvd_cifar.reporting import terminal
terminal.open_streams()
for number in range(200):
    terminal.say("a r\\u00fcn \\udcff")
complain("done")
child = subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in (0, 1, 2)]"])
os._exit(7 if child.returncode == 0 else 1)
"""


@pytest.mark.parametrize(
    ("streams", "locale"),
    [
        ("<&- >&- 2>&-", "C"),
        (">/dev/full 2>/dev/full", "C.UTF-8"),
        ("| head -1", "en_US.ISO-8859-1"),
    ],
)
def test_no_stream_ends_the_process(streams: str, locale: str) -> None:
    script = f'"$1" -c "$2" {streams}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", script, "bash", sys.executable, PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env={"LC_ALL": locale})
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
