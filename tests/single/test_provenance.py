"""The commit of a run: of the package's own code, never of a checkout that it happens to lie in."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
