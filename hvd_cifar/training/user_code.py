"""A user's own model, data set and callbacks, by name: the same objects on every rank, and copies of their files.

A run copies the files of net, data set and callbacks, and what these have imported from their own folder, to RUN/code,
with digests in config.json. All processes of a job, and `evaluate`, `predict` and `export`, use the copies.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_cifar import fields
from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError, cause_of, reason_of
from hvd_cifar.files import complain, replace_text
from hvd_cifar.runtime import environment
from hvd_cifar.training import run_dir

FOLDER = "code"
# Not the user's: this package, installed ones, Python's.
OTHERS = (str(Path(__file__).parents[1]) + os.sep, *(p + os.sep for p in {sys.prefix, *sysconfig.get_paths().values()}))

# By the name under which a module is imported, or the path of a FILE.py: where the file was, and its text.
Copies = dict[str, tuple[str, str]]
_copies: Copies = {}
_texts: dict[str, str] = {}  # of each FILE.py that has been run
_loads: list[str] = []  # the files that run now


def load(spec: str, option: str) -> Any:
    """The object that FILE.py:NAME or package.module:NAME names. A collective.

    Every rank runs rank 0's text of FILE.py, even on a host that lacks the file. Modules that FILE.py imports from its
    folder must be on every host. `option`, such as "--model", is for messages: UserError on every rank, with the cause,
    where one cannot find or run the object.
    """
    (place, _, name), what = spec.rpartition(":"), f"{option} {spec}"
    text = collectives.on_root(lambda: _read(place, what)) if place.endswith(".py") else None

    def find() -> Any:
        with errors_of(what):
            if text is None:
                _search_after_installed(os.getcwd())
            module = importlib.import_module(place) if text is None else _module_of(place, text)
        if not hasattr(module, name):
            public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
            raise UserError(f"{what}: there is no {name} in {place}, which has {public[:200]}")
        return getattr(module, name)

    return collectives.on_every_rank(find)


def callback(spec: str) -> Any:
    """The callback that --callbacks names: an object, or a class that is called without arguments. A collective."""
    found = load(spec, "--callbacks")

    def made() -> Any:
        with errors_of(f"--callbacks {spec}, called without arguments"):
            return found()

    return collectives.on_every_rank(made) if isinstance(found, type) else found


def _read(file: str, what: str) -> str:
    try:
        return _copies[file][1] if file in _copies else _text_of(file)
    except (OSError, UnicodeError, SyntaxError) as failure:
        reason = getattr(failure, "strerror", None) or "is not text"
        raise UserError(f"{what}: {reason}; give a Python file that rank 0's host has") from None


def _text_of(file: str) -> str:
    with tokenize.open(file) as content:  # in the encoding that the file declares
        return content.read()


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Turn an error of the user's code in the block into a UserError of one line: `what` failed, and the cause."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as failure:
        raise UserError(f"{what}: {cause_of(failure)}") from failure


class _Loaded(BaseException):
    """Ends the run of a file at its call of `train` or `evaluate`."""


def leave_while_loading() -> None:
    """End the run of a program's file that is loaded for an object in it: a net is defined before it is trained."""
    if _loads:
        raise _Loaded


def _search_after_installed(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _module_of(file: str, text: str) -> Any:
    """The file as a module, run once per process. It can import modules of its folder, after installed ones.

    Where the file is a program that trains, the module holds what is defined before it does.
    """
    name = f"{Path(file).stem}_{_digest(f'{file}{text}')[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _search_after_installed(os.path.dirname(file))
    spec = _spec(name, file, text)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _texts[file] = text
    _loads.append(name)
    try:
        with contextlib.suppress(_Loaded):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loads.pop()
    return module


class _Text(importlib.abc.Loader):
    """Runs a text as the file that it was read from, even if the file is gone. Tracebacks show its lines."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text

    def exec_module(self, module: Any) -> None:
        linecache.cache[self.file] = (len(self.text), None, self.text.splitlines(keepends=True), self.file)
        exec(compile(self.text, self.file, "exec"), vars(module))


def _spec(name: str, file: str, text: str) -> Any:
    inside = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
    loader = _Text(file, text)
    return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules in `_copies`, before those of the same name in a folder."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in _copies:
            return _spec(name, *_copies[name])
        inner = next((file for other, (file, _) in _copies.items() if other.startswith(f"{name}.")), None)
        if inner is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)  # a folder without an __init__.py
        spec.submodule_search_locations = [os.path.dirname(inner)]
        return spec


sys.meta_path.insert(0, _Finder())


def use_copies(copies: Copies) -> None:
    """Have all later loads and imports take these texts instead of the files. Modules keep the files' names."""
    _copies.clear()
    _copies.update(copies)


def spec_of(thing: Any) -> str:
    """The name of an object for the run's record: FILE.py:NAME of the program itself, or module:NAME."""
    module, name = getattr(thing, "__module__", "__main__"), getattr(thing, "__qualname__", type(thing).__name__)
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file and file.endswith(".py"):  # no other file can be named by an option
        module = os.path.abspath(file)
    return f"{module}:{name.rpartition('.')[2].strip('<>')}"


def modules_of(settings: TrainSettings, objects: Iterable[Any]) -> dict[str, str]:
    """The user's modules in this process, file by module's name; "FILE.py" of an option stands for its own name.

    `objects`: those that a program has passed instead of names.
    """
    specs = (settings.model, settings.dataset, *settings.callbacks)
    places = [spec.rpartition(":")[0] for spec in specs if fields.is_user_code(spec)]
    found = {place: place for place in places if place.endswith(".py")}
    packages = {place.partition(".")[0] for place in places if place not in found}
    homes = [sys.modules.get(getattr(one, "__module__", None) or type(one).__module__) for one in objects]
    files = [*found, *(os.path.abspath(file) for home in homes if (file := getattr(home, "__file__", None)))]
    folders = tuple(os.path.dirname(file) + os.sep for file in files)
    for name, module in list(sys.modules.items()):
        file = os.path.abspath(getattr(module, "__file__", None) or "")
        is_users = file.startswith(folders) or name.partition(".")[0] in packages
        if is_users and file.endswith(".py") and not file.startswith(OTHERS) and file not in found.values():
            found[name] = file
    return found


def keep(folder: Path, modules: dict[str, str]) -> list[dict[str, Any]]:
    """Copy the files of `modules_of` into a run directory, and describe them for config.json. On rank 0.

    UserError where a copy fails.
    """
    described = []
    for module, file in modules.items():
        try:
            text = _copies[module][1] if module in _copies else _texts.get(file) or _text_of(file)
            digest = _digest(text)
            copy = folder / FOLDER / f"{digest[:12]}-{os.path.basename(file)}"
            copy.parent.mkdir(exist_ok=True)
            if not copy.exists():
                replace_text(copy, text)
        except (OSError, UnicodeError, SyntaxError) as failure:
            raise UserError(f"cannot copy {file} into {folder / FOLDER}: {reason_of(failure)}") from None
        described.append({"module": module, "file": file, "copy": copy.name, "sha256": digest})
    return described


def _copies_of(folder: Path, left_out: Sequence[str] = ()) -> Copies:
    """The copies of a run directory, without files of the specs `left_out`. UserError where a copy is damaged."""
    copies: Copies = {}
    config = folder / "config.json"
    for entry in run_dir.recorded(config)["run"].get("code", ()) if config.exists() else ():
        if entry["file"] not in {spec.rpartition(":")[0] for spec in left_out}:
            copy = folder / FOLDER / Path(entry["copy"]).name
            try:
                text = copy.read_text(encoding="utf-8")
            except (OSError, UnicodeError):
                text = ""
            if _digest(text) != entry["sha256"]:
                raise UserError(f"{copy} is not what the run has written there: bring it back")
            copies[entry["module"]] = (entry["file"], text)
    return copies


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _edited(copies: Copies) -> list[str]:
    """The modules whose file is there, and not as its copy."""

    def is_as(text: str, file: str) -> bool:
        try:
            return not os.path.exists(file) or _text_of(file) == text
        except (OSError, UnicodeError, SyntaxError):
            return False

    return [module for module, (file, text) in copies.items() if not is_as(text, file)]


def to_continue(settings: TrainSettings) -> Copies:
    """The copies that the processes of this start use: none in a new run. On rank 0.

    The starts of a job use all copies. Another start uses a file that has been edited since, and a note names it.
    """
    origin = run_dir.origin(settings)
    if origin is None or not origin.exists():
        return {}
    then, copies = run_dir.recorded(origin)["run"], _copies_of(origin.parent)
    if (launch := environment.launch()) and then.get("job") == launch.began:
        return copies
    for module in _edited(copies):
        file, _ = copies.pop(module)
        complain(f"note: {file} has changed since the run in {origin.parent} was started with it, and is used as it is")
    return copies


def of_trained(folder: Path, left_out: Sequence[str] = ()) -> Copies:
    """The copies of a run whose net is used. A note names each file that has been edited since. On rank 0.

    `left_out`: specs of objects that the user names instead of the run's. UserError where a copy is damaged.
    """
    copies = _copies_of(folder, left_out)
    for module in _edited(copies):
        complain(f"note: {copies[module][0]} has changed since training: the copy in {folder / FOLDER} is used")
    return copies
