"""`python -m tests.fuzz [--minutes N] [READER ...]`: coverage-guided fuzzing of readers, for developers.

Needs atheris (`.venv/bin/python -m pip install atheris`), which the tests do not. What fails a reader is written to
tests/fuzz/corpus/READER and printed; `tests/single/test_fuzz.py` reads the corpus again in each test run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ["cache", "config", "data", "hostfile", "image", "manifest", "metrics", "names", "record", "run", "summary"]
CORPUS = Path(__file__).parent / "corpus"
LIMITS = ["-rss_limit_mb=3072", "-timeout=10", "-max_len=16384", "-print_final_stats=1"]


def main() -> int:
    """Fuzz readers one after the other, each in a process of its own; exit code 1: one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="for each reader")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"of {', '.join(NAMES)} [default: all]")
    found = parser.parse_args()
    if unknown := set(found.readers) - set(NAMES):
        parser.error(f"no reader is called {unknown.pop()}; give {', '.join(NAMES)}")
    try:
        atheris = importlib.import_module("atheris")  # without types
    except ImportError:
        print("tests.fuzz: atheris is not installed: .venv/bin/python -m pip install atheris", file=sys.stderr)
        return 2
    if found.child:
        return _fuzz(atheris, found.readers[0], found.minutes)
    failed = []
    for name in found.readers or NAMES:
        print(f"== {name}", flush=True)
        words = [sys.executable, "-m", "tests.fuzz", "--child", "--minutes", str(found.minutes), name]
        if subprocess.run(words).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "no reader failed")
    return int(bool(failed))


def _fuzz(atheris: Any, name: str, minutes: float) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with atheris.instrument_imports(include=["hvd_cifar", "yaml"]):
        from tests.fuzz import readers
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as grown:

        def once(content: bytes) -> None:
            readers.read(name, content, Path(place))

        # New inputs go to the first folder; the corpus in the repository holds only seeds and finds.
        options = [f"-max_total_time={minutes * 60:.0f}", f"-artifact_prefix={corpus}/", *LIMITS]
        atheris.Setup([sys.argv[0], grown, str(corpus), *options], once)
        atheris.Fuzz()  # ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
