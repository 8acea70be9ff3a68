"""From where this program's processes import: never from the folder in which they start. Standard library only."""

from __future__ import annotations

import os
import sys

# -I: neither the current folder nor PYTHONPATH come before the standard library, and PYTHONHOME is not read.
OPTIONS = ("-I",)


def set_import_path() -> None:
    """Keep the standard library and the environment's packages first; the folders of PYTHONPATH come after them.

    To be called before other imports. Python itself puts the current folder (`python -m`) and PYTHONPATH first.
    """
    library = (os.path.dirname(os.__file__), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    first = next((i for i, entry in enumerate(sys.path) if entry.endswith(library)), 0)
    del sys.path[:first]
    # Python takes an empty entry for the current folder; here it names none.
    folders = (os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)
    sys.path += [folder for folder in folders if folder not in sys.path]
