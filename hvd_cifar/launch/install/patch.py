"""Apply a unified diff. A minimal machine has no `patch` program, which would also accept inexact matches."""

import re
from pathlib import Path

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


class PatchError(Exception):
    """The patch does not fit the text."""


def apply_patch(patch: str, folder: Path) -> list[Path]:
    """Apply a unified diff, with names after `a/` and `b/`, to files under `folder`; return the changed files.

    Raises PatchError where a context line does not match. A file is written only if all its hunks match. The patch may
    not add or remove files.
    """
    changed = []
    for part in re.split(r"(?m)^--- a/", patch)[1:]:
        lines = part.splitlines()
        path = folder / lines[0].split("\t")[0]
        path.write_text(_patched(path, lines[2:]))
        changed.append(path)
    return changed


def _patched(path: Path, diff: list[str]) -> str:
    old = path.read_text().splitlines()
    new: list[str] = []
    done = 0  # lines of `old` that have been copied or replaced
    for line in diff:
        hunk = HUNK.match(line)
        if hunk:
            start = int(hunk[1]) - 1
            new += old[done:start]
            done = start
        elif line.startswith("+"):
            new.append(line[1:])
        elif line.startswith(("-", " ")):
            if done >= len(old) or old[done] != line[1:]:
                found = repr(old[done]) if done < len(old) else "the end"
                raise PatchError(f"{path} line {done + 1}: expected {line[1:]!r}, found {found}")
            if line.startswith(" "):
                new.append(old[done])
            done += 1
        else:
            raise PatchError(f"not a line of a unified diff: {line!r}")
    return "\n".join(new + old[done:]) + "\n"
