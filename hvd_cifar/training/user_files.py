"""The files of the user that a run was started with: digests in its config.json, copies in RUN/code.

They are the files of net, data set and callbacks, and what these have imported from their own folder. All processes of
a job, and `evaluate`, `predict` and `export`, use the copies. A run that resumes compares.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvd_cifar import fields
from hvd_cifar.config import TrainSettings
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import complain, replace_text
from hvd_cifar.runtime import environment
from hvd_cifar.training import run_dir
from hvd_cifar.training.user_code import Copies, source_of, text_of

FOLDER = "code"
# Not the user's: this package, installed ones, Python's.
OTHERS = (str(Path(__file__).parents[1]) + os.sep, *(p + os.sep for p in {sys.prefix, *sysconfig.get_paths().values()}))


def modules_of(settings: TrainSettings, objects: Iterable[Any]) -> dict[str, str]:
    """The user's modules in this process, file by module's name; "FILE.py" of an option stands for its own name.

    Args:
        objects: that a program has passed instead of names.
    """
    folders, packages, found = set(), set(), {}
    for spec in (settings.model, settings.dataset, *settings.callbacks):
        place = spec.rpartition(":")[0] if fields.is_user_code(spec) else ""
        if place.endswith(".py"):
            found[place] = place
            folders.add(os.path.dirname(place))
        elif place:
            packages.add(place.partition(".")[0])
    for thing in objects:
        module = sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)
        if file := getattr(module, "__file__", None):
            folders.add(os.path.dirname(os.path.abspath(file)))
    for name, module in list(sys.modules.items()):
        file = os.path.abspath(getattr(module, "__file__", None) or "")
        beside = any(os.path.dirname(file) == folder or file.startswith(folder + os.sep) for folder in folders)
        is_users = beside or name.partition(".")[0] in packages
        if is_users and file.endswith(".py") and not file.startswith(OTHERS) and file not in found.values():
            found[name] = file
    return found


def keep(folder: Path, modules: dict[str, str], of_course: Iterable[str]) -> list[dict[str, Any]]:
    """Copy the files into a run directory, and describe them for config.json. On rank 0.

    Args:
        modules: from `modules_of`.
        of_course: names of modules that may change the run's course: those of net, recipe and data set.

    Raises:
        UserError: where a file cannot be copied.
    """
    told, course = [], set(of_course)
    for module, file in modules.items():
        try:
            text = source_of(module, file)
            digest = _digest(text)
            copy = folder / FOLDER / f"{digest[:12]}-{Path(file).name}"
            copy.parent.mkdir(exist_ok=True)
            if not copy.exists():
                replace_text(copy, text)
        except (OSError, UnicodeError, SyntaxError) as failure:
            raise UserError(f"cannot copy {file} into {folder / FOLDER}: {reason_of(failure)}") from None
        told.append({"module": module, "file": file, "copy": copy.name, "sha256": digest, "course": module in course})
    return told


def copies_of(folder: Path, left_out: Sequence[str] = ()) -> Copies:
    """The copies of a run directory.

    Args:
        left_out: specs of objects, FILE.py:NAME, that the user names instead of the run's: their files are taken.

    Raises:
        UserError: where a copy is damaged.
    """
    copies: Copies = {}
    config = folder / "config.json"
    for told in run_dir.recorded(config)["run"].get("code", ()) if config.exists() else ():
        if told["file"] not in {spec.rpartition(":")[0] for spec in left_out}:
            copies[told["module"]] = (told["file"], _whole(folder / FOLDER / Path(told["copy"]).name, told["sha256"]))
    return copies


def _whole(copy: Path, digest: str) -> str:
    try:
        text = copy.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as failure:
        raise UserError(f"{copy}: {reason_of(failure)}; it is the run's copy of a file: bring it back") from None
    if _digest(text) != digest:
        raise UserError(f"{copy} is not what the run has written there: bring it back")
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def to_continue(settings: TrainSettings) -> Copies:
    """The copies that the processes of this start use: none in a new run. On rank 0.

    Raises:
        UserError: where a file that may change the results of the run to resume is not the same.
    """
    origin = run_dir.origin(settings)
    if origin is None or not origin.exists():
        return {}
    then, copies = run_dir.recorded(origin)["run"], copies_of(origin.parent)
    if (launch := environment.launch()) and then.get("job") == launch.began:
        return copies
    for told in then.get("code", ()):
        file, text = copies[told["module"]]
        now = _text_now(file, text)
        if now == text:
            continue
        # A program also holds settings, such as the number of epochs: `refuse_other_net` compares what it has built.
        may_matter = told["course"] and file != _program() and _code_of(now) != _code_of(text)
        if may_matter and settings.changed_code == "refuse":
            raise UserError(
                f"{file} is not the file that the run in {origin.parent} was started with (its copy: "
                f"{FOLDER}/{told['copy']}): bring that back, or give --changed-code accept, or another --run-dir"
            )
        complain(f"note: {file} has changed since the run in {origin.parent} was started with it")
        copies.pop(told["module"])
    return copies


def of_trained(folder: Path, left_out: Sequence[str]) -> Copies:
    """As `copies_of`, for the use of a trained net. A note names each file that has been edited since. On rank 0."""
    copies = copies_of(folder, left_out)
    for file, text in copies.values():
        if file != _program() and _text_now(file, text) != text:
            complain(f"note: {file} has changed since training: the copy in {folder / FOLDER} is used")
    return copies


def _program() -> str:
    return os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")


def _text_now(file: str, text: str) -> str:
    """The text of a file; `text` where the file is gone."""
    try:
        return text_of(file) if os.path.exists(file) else text
    except (OSError, UnicodeError, SyntaxError):
        return ""


class _NoDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def _code_of(text: str) -> str:
    """A file's text without comments, docstrings and positions; the text itself where it is no Python."""
    try:
        return ast.dump(_NoDocstrings().visit(ast.parse(text)))
    except (SyntaxError, ValueError):
        return text
