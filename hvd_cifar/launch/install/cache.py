"""What set-up builds: once for a user, and kept under a hash of everything that it is built from."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hvd_cifar.launch.install.steps import Steps, locked


def key(made_of: Mapping[str, object]) -> str:
    """The hash of the ingredients, shortened."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:20]


def cache_folder(environ: Mapping[str, str], otherwise: Path) -> Path:
    """The user's folder for what is built, or `otherwise` if that is not writable."""
    home = environ.get("HOME", "")
    base = environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else "")
    folder = Path(base, "hvd_cifar", "wheels") if os.path.isabs(base) else otherwise
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = otherwise
    if not os.access(folder, os.W_OK):
        folder = otherwise
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(
    steps: Steps, names: tuple[str, str], made_of: Mapping[str, object], otherwise: Path, build: Callable[[Path], Path]
) -> Path:
    """The file that `build` makes in a folder, from the cache, or built and put there. Raises StepFailed.

    One process per key builds; others wait for its lock. A finished file's folder appears in the cache in one step.

    Args:
        names: of the step if the file is there already, and if it is built.
        made_of: everything that the file depends on.
        otherwise: the folder if the user's own is not writable.
        build: gets a temporary folder.
    """
    folder = cache_folder(os.environ, otherwise) / key(made_of)
    with locked(
        folder.with_suffix(".lock"), f"another set-up builds the same {names[1].split(':')[0]}: waiting for it"
    ):
        if folder.is_dir() and (found := next(filter(Path.is_file, folder.iterdir()), None)):
            with steps.step(names[0]):
                return found
        with steps.step(names[1]), tempfile.TemporaryDirectory(prefix="hvd_cifar-") as work:
            made = build(Path(work))
            partial = folder.with_suffix(".partial")  # beside its place, since /tmp may be another disk
            for old in (partial, folder):
                shutil.rmtree(old, ignore_errors=True)
            partial.mkdir()
            shutil.copy(made, partial)
            partial.rename(folder)
        return folder / made.name
