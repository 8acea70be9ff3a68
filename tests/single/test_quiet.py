"""What a rank's start imports and what it prints."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def _run(program: str, **chosen: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **chosen}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables)


def test_the_start_drops_notes_and_does_not_import_plots_and_fits_which_can_be_imported_later() -> None:
    """All else that libraries write is printed."""
    program = """
import gc, os, sys
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from hvd_cifar.training.train import assemble
    from hvd_cifar.tools.benchmark import results, step
    os.write(2, b"a library's warning\\n")
os.write(2, b"later\\n")
assert gc.isenabled() and gc.get_freeze_count() > 100_000
print("keras" in sys.modules, "matplotlib" in sys.modules, "scipy" in sys.modules)
from matplotlib import pyplot
with quiet_start():
    pass
print(sys.modules["matplotlib"].pyplot is pyplot)
"""
    done = _run(program)
    assert done.stdout.split() == ["True", "False", "False", "True"], done.stderr
    assert done.stderr == "a library's warning\nlater\n"


def test_settings_of_other_keras_programs_change_no_net(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "torch", "image_data_format": "channels_first"}')
    program = """
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from benchmarks import nets
print(nets.build("tutorial", 24).parameters)
"""
    done = _run(program, KERAS_HOME=str(tmp_path), KERAS_BACKEND="jax")
    assert done.stdout == "1068298\n", done.stderr


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
    done = _run(program)
    assert (done.returncode, done.stderr) == (code, "F0000 CHECK failed: no such instruction\n")
