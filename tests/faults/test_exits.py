"""Code of a user that ends its own process: code 0 means that the work is done, and a line names the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.launch.job import Job, Starter
from hvd_cifar.training.run_dir import read_summary
from tests.faults.jobs import Running, start
from tests.ranks import CHECKOUT, environment

ENDS = """
import ctypes, os, sys
import hvd_cifar, keras

class Ends(hvd_cifar.Callback):
    def on_step(self, run):
        if run.step == 3 and run.world.rank == run.world.size - 1:
            {call}

def net(image_shape, classes):
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

if __name__ == "__main__":
    course = dict(global_batch_size=8, max_steps=6, run_dir="run", data_dir=sys.argv[1])
    hvd_cifar.train(net, "synthetic", callbacks=[Ends()], **course)
"""
LINE = "hvd_cifar: rank {} ended first, with exit code {}"
EARLY = "0, before the job was over"


def test_a_callback_cannot_end_a_run_as_if_it_were_complete(embedded: Path, tmp_path: Path) -> None:
    """One rank that calls C's _exit(0), the second of two with sys.exit(0), and with a code of its own; at once."""
    jobs: list[tuple[Running, int, str]] = []
    for ranks, call, code, said in (
        (1, "ctypes.CDLL(None)._exit(0)", 1, EARLY),
        (2, "os._exit(0)", 1, EARLY),
        (1, "sys.exit(0)", 1, "1: SystemExit: 0 (ends2.py, line 8)"),
    ):
        program = tmp_path / f"ends{len(jobs)}.py"
        program.write_text(ENDS.replace("{call}", call))
        pace = ["--callbacks", f"{program}:Ends"]
        job = start(["-np", ranks], embedded, tmp_path / f"run{len(jobs)}", "--max-steps", 6, pace=pace)
        jobs.append((job, code, LINE.format(ranks - 1, said)))
    try:
        for job, code, line in jobs:
            assert job.wait() == code, job.said()
            assert [said for said in job.said().splitlines() if said.startswith("hvd_cifar: ")] == [line], job.said()
            assert "Traceback" not in job.said() and read_summary(job.run_dir) == {}
    finally:
        for job, _, _ in jobs:
            job.end()


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [("sys.exit(3)", 3, "3: SystemExit: 3 (program.py, line 8)"), ("raise RuntimeError('one rank')", 1, "1")],
)
def test_a_program_of_the_user_s_gives_the_code_of_the_rank_that_ended_first(
    call: str, code: int, said: str, embedded: Path, tmp_path: Path
) -> None:
    """The other rank, which loses it, ends later, though Horovod has ended there at once."""
    (tmp_path / "program.py").write_text(ENDS.replace("{call}", call))
    words = [str(CHECKOUT / "run.sh"), "-np", "2", "python", "program.py", str(embedded)]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    own = [line for line in done.stderr.splitlines() if line.startswith("hvd_cifar: ")]
    assert own == [LINE.format(1, said)] and ("raise" in call or "Traceback" not in done.stderr)
    assert done.returncode == code and read_summary(tmp_path / "run") == {}


@pytest.mark.parametrize(("rank", "code"), [("pass", 1), ("import os, sys; os.utime(sys.argv[1])", 0)])
def test_the_summary_of_an_earlier_job_is_no_success(
    rank: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (proof := tmp_path / "summary.json").write_text("{}")
    assert Job(can_stop=False).run(Starter([sys.executable, "-c", rank, str(proof)], os.environ, proof=proof)) == code
    assert capfd.readouterr().err == "hvd_cifar: all ranks ended with exit code 0, before the job was over\n" * code
