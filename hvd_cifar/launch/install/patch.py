"""Apply a unified diff. A minimal machine has no `patch` program, which would also accept inexact matches."""

import re
from pathlib import Path


class PatchError(Exception):
    """The patch does not fit the text."""


def apply_patch(patch: str, folder: Path) -> None:
    """Apply a unified diff, with names after `a/` and `b/`, to files under `folder`; it adds and removes none.

    Raises PatchError where a line does not match. A file is written only if all its hunks match.
    """
    for part in re.split(r"(?m)^--- a/", patch)[1:]:
        name, _, *diff = part.splitlines()
        path = folder / name.split("\t")[0]
        path.write_text(_patched(path, diff))


def _patched(path: Path, diff: list[str]) -> str:
    old, new, done = path.read_text().splitlines(), list[str](), 0  # `done`: lines of `old` copied or replaced
    for line in diff:
        kind, text = line[:1], line[1:]
        if hunk := re.match(r"@@ -(\d+)", line):
            new += old[done : int(hunk[1]) - 1]
            done = int(hunk[1]) - 1
            continue
        if kind in "- " and old[done : done + 1] != [text]:
            raise PatchError(f"{path} line {done + 1}: expected {text!r}, found {old[done : done + 1]}")
        new += [text] if kind in "+ " else []
        done += kind in "- "
    return "\n".join(new + old[done:]) + "\n"
