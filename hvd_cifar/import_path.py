"""From where this program's processes import: never from the folder in which they start. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

# -I: neither the current folder nor PYTHONPATH come before the standard library, and PYTHONHOME is not read.
OPTIONS = ("-I",)


def set_import_path() -> None:
    """Keep the standard library and the environment's packages first; the folders of PYTHONPATH come after them.

    To be called before other imports. Python itself puts the current folder (`python -m`) and PYTHONPATH first.
    """
    library = (os.path.dirname(os.__file__), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    first = next((i for i, entry in enumerate(sys.path) if entry.endswith(library)), 0)
    del sys.path[:first]
    sys.path += [folder for folder in folders_of(os.environ) if folder not in sys.path]


def folders_of(environ: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH. Python takes an empty entry for the current folder; here it names none."""
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def foreign(names: Iterable[str], environ: Mapping[str, str], own: str) -> list[str]:
    """The files and folders in PYTHONPATH that have the names of these modules; `own`: a folder that may."""
    places = (os.path.join(folder, name) for folder in folders_of(environ) if folder != own for name in names)
    found = ((f"{place}.py", os.path.join(place, "__init__.py")) for place in places)
    return [file for files in found for file in files if os.path.isfile(file)]
