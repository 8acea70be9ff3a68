"""Writing a file whole or not at all. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader, a crash or a full disk leaves the old text or the new one.

    Raises:
        OSError: where it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
