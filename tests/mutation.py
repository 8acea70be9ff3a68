"""Mutation testing of the core, by cosmic-ray: which small faults do the fast tests miss?

    .venv/bin/python -m pip install 'cosmic-ray==8.*'
    .venv/bin/python -m tests.mutation [--sample N] [WORD ...]     # rows whose modules contain a word; none: all

A sample of each row's mutants, the same every time, is tried in a copy of the last commit, one after the other. Prints
the diffs of those that survive. Exit code 1: more than one in ten survive; 2: a row's tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.ranks import CHECKOUT

# Modules of the core, and the tests that are to notice a fault there.
ROWS = {
    "hvd_cifar/training/plan.py": "tests/single/test_plan.py",
    "hvd_cifar/training/step.py": "tests/single/test_step.py tests/parallel/test_exactness.py",
    "hvd_cifar/training/checkpoint.py": "tests/single/test_checkpoint.py tests/single/test_state.py",
    "hvd_cifar/training/state.py": "tests/single/test_state.py tests/single/test_checkpoint.py",
    "hvd_cifar/data/sampler.py": "tests/single/test_sampler.py",
    "hvd_cifar/distributed/*.py": (
        "tests/parallel/test_collectives.py tests/parallel/test_optimizer.py tests/parallel/test_batch_norm.py"
        " tests/parallel/test_same_bits.py tests/parallel/test_replicas.py"
    ),
}
# Types such as `int | None`, which nothing evaluates; and `is` for `==`, the same of texts and numbers of the source.
NO_MUTANTS = ["core/ReplaceBinaryOperator_BitOr_.*", "core/ReplaceComparisonOperator_(Eq_Is|NotEq_IsNot)"]
MOST_SURVIVORS = 0.1


def _sample(session: Path, size: int) -> int:
    """Skip all mutants of a session but a sample; how many are left."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(str(session), WorkDB.Mode.open) as db:
        places = {item.job_id: str(item.mutations) for item in db.pending_work_items}
        pending = sorted(places, key=lambda job: places[job])  # their numbers are random
        random.Random(0).shuffle(pending)
        for job in pending[size:]:
            db.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    return min(size, len(pending))


def _survivors(session: Path) -> list[str]:
    """The diffs of mutants that no test noticed."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome

    with use_db(str(session), WorkDB.Mode.open) as db:
        return [str(result.diff) for _, result in db.results if result.test_outcome == TestOutcome.SURVIVED]


def _try_row(folder: Path, copy: Path, modules: str, tests: str, sample: int) -> tuple[int, list[str]]:
    """The number of mutants tried, and the diffs of those that survive.

    Raises subprocess.CalledProcessError where the tests fail without a mutant.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    began = time.monotonic()
    subprocess.run(words, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    settings = {
        "module-path": sorted(str(path.relative_to(copy)) for path in copy.glob(modules)),
        "timeout": 3 * (time.monotonic() - began) + 30,  # a hang is noticed
        "excluded-modules": ["**/__init__.py"],
        "test-command": " ".join(words),
    }
    lines = ["[cosmic-ray]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    lines += ["[cosmic-ray.distributor]", 'name = "local"', "[cosmic-ray.filters.operators-filter]"]
    lines += [f"exclude-operators = {json.dumps(NO_MUTANTS)}"]
    config, session = folder / "cosmic-ray.toml", folder / f"{modules.replace('/', '-')}.sqlite"
    config.write_text("\n".join(lines) + "\n")
    tool = Path(sys.executable).with_name("cosmic-ray")
    subprocess.run([tool, "init", config, session], cwd=copy, check=True)
    subprocess.run([tool.with_name("cr-filter-operators"), session, config], cwd=copy, check=True)
    tried = _sample(session, sample)
    subprocess.run([tool, "exec", config, session], cwd=copy, check=True)
    return tried, _survivors(session)


def main() -> int:
    """Try the rows; print a line for each, and the survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--sample", type=int, default=40, metavar="N", help="mutants of a row (40)")
    parser.add_argument("words", nargs="*", metavar="WORD")
    given = parser.parse_args()
    tried, survived = 0, 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        copy = Path(temporary) / "checkout"
        subprocess.run(["git", "clone", "--quiet", "--shared", CHECKOUT, copy], check=True)
        for modules, tests in ROWS.items():
            if given.words and not any(word in modules for word in given.words):
                continue
            try:
                n, diffs = _try_row(Path(temporary), copy, modules, tests, given.sample)
            except subprocess.CalledProcessError as error:
                print(f"{modules}: {error}", file=sys.stderr)
                return 2
            print(*diffs, f"{modules}: {n} mutants, {len(diffs)} survived", sep="\n", flush=True)
            tried, survived = tried + n, survived + len(diffs)
    print(f"{tried} mutants, {survived} survived")
    return int(survived > MOST_SURVIVORS * tried)


if __name__ == "__main__":
    sys.exit(main())
