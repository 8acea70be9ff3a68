"""Plant one small fault at a time in a copy of the checkout, and see whether the tests that ought to notice it fail.

    python -m tests.mutation [WORD ...]      # faults whose file or reason contains one of the words; none: all of them

A fault is killed where its tests fail, and survives where they pass. It is stale where its text is not found once, or
where its tests do not pass without it. Exit code 1: a fault is stale, or more than one in ten survive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.faults import FAULTS, Fault
from tests.ranks import CHECKOUT

SECONDS = 300  # for the tests of one fault; a hang counts as noticed
FAILED = 1  # pytest's exit code


def copy_checkout(target: Path) -> None:
    """The checkout's files as they are, without what git ignores."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)


def run_tests(copy: Path, tests: str) -> tuple[bool, str]:
    """Whether tests pass in the copy, and the end of what pytest said.

    Raises:
        ValueError: where pytest could not run them.
    """
    file, _, chosen = tests.partition(" -k ")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *file.split()]
    words += ["-k", chosen] if chosen else []
    # A fault may not be hidden by the module compiled without it: two changes within a second look alike to Python.
    variables = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(words, cwd=copy, env=variables, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no end within {SECONDS} s"
    if done.returncode not in (0, FAILED):
        raise ValueError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.returncode == 0, done.stdout[-2000:]


def plant(copy: Path, fault: Fault) -> str:
    """What becomes of a fault: "killed", "survived", or why it is stale."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        passed, _ = run_tests(copy, fault.tests)
    except ValueError as error:
        return f"stale: {error}"
    finally:
        path.write_text(text, encoding="utf-8")
    return "survived" if passed else "killed"


def main(wanted: list[str]) -> int:
    """See the module; the exit code."""
    faults = [f for f in FAULTS if not wanted or any(word in f"{f.file} {f.why} {f.tests}" for word in wanted)]
    counts = {"killed": 0, "survived": 0, "stale": 0}
    sound: dict[str, str] = {}  # by tests: "" where they pass without a fault, else why they do not
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        for fault in faults:
            began = time.monotonic()
            found = (copy / fault.file).read_text(encoding="utf-8").count(fault.old)
            if found != 1:
                outcome = f"stale: its text is found {found} times"
            else:
                if fault.tests not in sound:
                    try:
                        passed, said = run_tests(copy, fault.tests)
                        sound[fault.tests] = "" if passed else f"stale: its tests fail without it: {said}"
                    except ValueError as error:
                        sound[fault.tests] = f"stale: {error}"
                outcome = sound[fault.tests] or plant(copy, fault)
            counts[outcome.partition(":")[0]] += 1
            print(f"{outcome:8} {time.monotonic() - began:4.0f} s  {fault.file}: {fault.why}", flush=True)
    ran = counts["killed"] + counts["survived"]
    print(f"{ran} faults: {counts['killed']} killed, {counts['survived']} survived; {counts['stale']} stale")
    return int(counts["stale"] > 0 or counts["survived"] * 10 > ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
