"""Plant one small fault at a time in a copy of the checkout, and run the tests that should fail with it.

    python -m tests.mutation [WORD ...]      # faults whose file, effect or tests contain a word; without words: all

A fault is killed if its tests fail, and survives if they pass. It is stale if its text does not occur exactly once, or
if its tests fail without it. Faults with the same tests run one after the other, and these tests run once without a
fault. Exit code 1: a fault is stale, or more than one in ten survive; 2: no fault has such a word.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.faults import FAULTS, Fault
from tests.ranks import CHECKOUT, run_to_end

SECONDS = 300  # for tests without a fault
# With a fault: TIMES what they take without it, and MORE_SECONDS. A hang counts as a failure.
TIMES, MORE_SECONDS = 3, 30
FAILED = 1  # pytest's exit code


def copy_checkout(target: Path) -> None:
    """Copy the checkout's files in their present state, except those that git ignores."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)


def run_tests(copy: Path, tests: str, seconds: float) -> tuple[bool, str]:
    """Whether tests pass in the copy within a number of seconds, and what fails.

    Raises:
        ValueError: where pytest cannot run them.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *shlex.split(tests)]
    # Python does not notice a second change of a module within a second: it would import what it compiled before.
    variables = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        code = run_to_end(words, seconds, cwd=copy, env=variables, stdout=output, stderr=subprocess.STDOUT)
        output.seek(0)
        said = output.read()
    if code is None:
        return False, f"no end within {seconds:.0f} s"
    if code not in (0, FAILED):
        raise ValueError(f"pytest ended with {code}: {_last_line(said)}")
    failures = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return code == 0, "; ".join(failures) or _last_line(said)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class Baseline:
    """Tests without a fault: "stale: " and the reason why they fail ("": they pass), and the seconds they take."""

    stale: str
    seconds: float


def baseline(copy: Path, tests: str) -> Baseline:
    """Run tests without a fault."""
    began = time.monotonic()
    try:
        passed, said = run_tests(copy, tests, SECONDS)
    except ValueError as error:
        passed, said = False, str(error)
    return Baseline("" if passed else f"stale: its tests fail without it: {said}", time.monotonic() - began)


def plant(copy: Path, fault: Fault, seconds: float) -> str:
    """The outcome of a fault: "killed", "survived", or "stale: " and the reason."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        passed, _ = run_tests(copy, fault.tests, seconds)
    except ValueError as error:
        return f"stale: {error}"
    finally:
        path.write_text(text, encoding="utf-8")
    return "survived" if passed else "killed"


def main(wanted: list[str]) -> int:
    """See the module; the exit code."""
    chosen = [f for f in FAULTS if not wanted or any(word in f"{f.file} {f.why} {f.tests}" for word in wanted)]
    if not chosen:
        print(f"no fault has {' or '.join(wanted)} in its file, effect or tests", file=sys.stderr)
        return 2
    counts = {"killed": 0, "survived": 0, "stale": 0}
    without: dict[str, Baseline] = {}  # by tests
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        for fault in sorted(chosen, key=lambda fault: fault.tests):
            began = time.monotonic()
            found = (copy / fault.file).read_text(encoding="utf-8").count(fault.old)
            if found != 1:
                outcome = f"stale: its text is found {found} times"
            else:
                if fault.tests not in without:
                    without[fault.tests] = baseline(copy, fault.tests)
                normal = without[fault.tests]
                outcome = normal.stale or plant(copy, fault, TIMES * normal.seconds + MORE_SECONDS)
            counts[outcome.partition(":")[0]] += 1
            print(f"{outcome:8} {time.monotonic() - began:4.0f} s  {fault.file}: {fault.why}", flush=True)
    ran = counts["killed"] + counts["survived"]
    print(f"{ran} faults: {counts['killed']} killed, {counts['survived']} survived; {counts['stale']} stale")
    return int(counts["stale"] > 0 or counts["survived"] * 10 > ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
