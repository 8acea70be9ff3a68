"""What a rank's start imports and what it prints."""

import os
import platform
import signal
import subprocess
import sys

import pytest

from hvd_cifar.reporting import quiet


def _run(program: str, level: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": level}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables)


@pytest.mark.parametrize("level", ["0", "2"])
def test_the_start_does_not_import_plots_and_fits_which_can_be_imported_later(level: str) -> None:
    program = """
import gc, sys
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from hvd_cifar.training import assemble
    from hvd_cifar.tools.benchmark import job, results
assert gc.isenabled() and gc.get_freeze_count() > 100_000
print("keras" in sys.modules, "matplotlib" in sys.modules, "scipy" in sys.modules)
from matplotlib import pyplot
import scipy.optimize
with quiet_start():
    pass
print(sys.modules["matplotlib"].pyplot is pyplot)
"""
    done = _run(program, level)
    assert done.stdout.split() == ["True", "False", "False", "True"], done.stderr


def test_notes_are_dropped_and_all_else_is_printed() -> None:
    program = """
import os
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from hvd_cifar.training import assemble
    os.write(2, b"a library's warning\\n")
os.write(2, b"later\\n")
"""
    assert _run(program, "2").stderr == "a library's warning\nlater\n"
    shown = _run(program, "0").stderr
    assert any(note in shown for note in quiet._NOTES)  # which ones, depends on the processor


@pytest.mark.skipif(platform.machine() != "x86_64", reason="TensorFlow decides itself on other processors")
@pytest.mark.parametrize(("chosen", "used"), [({}, True), ({"TF_ENABLE_ONEDNN_OPTS": "0"}, False)])
def test_tensorflow_uses_onednn_unless_the_user_disables_it(chosen: dict[str, str], used: bool) -> None:
    program = "from hvd_cifar.reporting.quiet import quiet_start\nwith quiet_start():\n    import tensorflow"
    kept = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    variables = {**kept, "TF_CPP_MIN_LOG_LEVEL": "0", **chosen}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=True)
    assert ("oneDNN custom operations are on" in done.stderr) == used


@pytest.mark.parametrize(("end", "code"), [("os.abort()", -signal.SIGABRT), ("os._exit(3)", 3)])
def test_the_last_words_of_a_process_that_dies_while_it_imports_are_printed(end: str, code: int) -> None:
    program = f"""
import os
from hvd_cifar.reporting import quiet
quiet._import_keras = lambda: None  # whose import takes seconds
with quiet.quiet_start():
    os.write(2, b"I0000 oneDNN custom operations are on\\nF0000 CHECK failed: no such instruction")
    {end}
"""
    done = _run(program, "2")
    assert (done.returncode, done.stderr) == (code, "F0000 CHECK failed: no such instruction")
