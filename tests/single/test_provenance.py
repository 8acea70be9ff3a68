"""The commit of a run: of the package's own code, never of a checkout that it happens to lie in."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.reporting import provenance


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_commit_is_named_and_a_change_since_is_marked(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert provenance.git_commit(package) is None  # no repository
    _git(tmp_path, "init", "-q")
    assert provenance.git_commit(package) is None  # an installed copy in somebody's checkout
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "first")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_commit(package) == commit
    (tmp_path / "notes").write_text("not of the package")
    assert provenance.git_commit(package) == commit
    (package / "__init__.py").write_text("changed = True")
    assert provenance.git_commit(package) == f"{commit}-dirty"


def test_the_command_is_one_that_a_shell_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, words, expected in (
        ("hvd_cifar.__main__", ["/x/__main__.py", "train", "a b"], "python -m hvd_cifar train 'a b'"),
        ("", ["my train.py", "--rate", "0.1"], "python 'my train.py' --rate 0.1"),  # a program's file
    ):
        module = importlib.machinery.ModuleSpec(spec, None) if spec else None
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", module)
        assert provenance.command() == expected
