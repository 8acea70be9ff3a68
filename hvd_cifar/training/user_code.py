"""Loads a user's own model, data set or callback by name: the same object on every rank of every host."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError, cause_of


def load(spec: str, option: str) -> Any:
    """The object that FILE.py:NAME or package.module:NAME names. A collective.

    Every rank runs rank 0's text of FILE.py, even on a host that lacks the file. Modules that FILE.py imports from its
    folder must be on every host.

    Args:
        spec: as `config` has checked it.
        option: for messages, such as "--model".

    Raises:
        UserError: on every rank, with the cause, where one rank cannot find or run the object.
    """
    place, _, name = spec.rpartition(":")
    text = collectives.on_root(lambda: _read(Path(place), f"{option} {spec}")) if place.endswith(".py") else None
    return collectives.on_every_rank(lambda: _object(place, name, text, f"{option} {spec}"))


def callback(spec: str) -> Any:
    """The callback that --callbacks names: an object, or a class that is called without arguments. A collective."""
    found = load(spec, "--callbacks")
    if not isinstance(found, type):
        return found

    def made() -> Any:
        with errors_of(f"--callbacks {spec}, called without arguments"):
            return found()

    return collectives.on_every_rank(made)


def load_alone(spec: str, option: str) -> Any:
    """As `load`, in a single process and without collectives."""
    place, _, name = spec.rpartition(":")
    what = f"{option} {spec}"
    return _object(place, name, _read(Path(place), what) if place.endswith(".py") else None, what)


def _read(file: Path, what: str) -> str:
    if str(file) in _copies:
        return _copies[str(file)][1]
    try:
        return text_of(file)
    except (OSError, UnicodeError, SyntaxError) as failure:
        reason = getattr(failure, "strerror", None) or "is not text"
        raise UserError(f"{what}: {reason}; give a Python file that rank 0's host has") from None


def _object(place: str, name: str, text: str | None, what: str) -> Any:
    with errors_of(what):
        if text is None:
            _search_after_installed(Path.cwd())
        module = importlib.import_module(place) if text is None else _module_of(Path(place), text)
    if not hasattr(module, name):
        public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise UserError(f"{what}: there is no {name} in {place}, which has {public[:200]}")
    return getattr(module, name)


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


_loads: list[str] = []  # the files that run now


def leave_while_loading() -> None:
    """End the run of a program's file that is loaded for an object in it: a net is defined before it is trained."""
    if _loads:
        raise _Loaded


def _search_after_installed(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


# By the name under which a module is imported, or the path of a FILE.py: where the file was, and its text.
Copies = dict[str, tuple[str, str]]
_copies: Copies = {}


def use_copies(copies: Copies) -> None:
    """Have all later loads and imports take these texts instead of the files. Modules keep the files' names."""
    _copies.clear()
    _copies.update(copies)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def text_of(file: str | Path) -> str:
    """The text of a Python file, in the encoding that it declares."""
    with tokenize.open(file) as content:
        return content.read()


def source_of(name: str, file: str) -> str:
    """The text of a module of the user as this process runs it."""
    return _copies[name][1] if name in _copies else _texts.get(file) or text_of(file)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that `use_copies` has been given, before those of the same name in a folder."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in _copies:
            file, text = _copies[name]
            inside = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                name, file, loader=_Text(file, text), submodule_search_locations=inside
            )
        inner = next((file for other, (file, _) in _copies.items() if other.startswith(f"{name}.")), None)
        if inner is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)  # a folder without an __init__.py
        spec.submodule_search_locations = [str(Path(inner).parent)]
        return spec


_FINDER = _Finder()


class _Text(importlib.abc.Loader):
    """Runs a text as the file that it was read from, even if the file is gone. Tracebacks show its lines."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text

    def exec_module(self, module: Any) -> None:
        linecache.cache[self.file] = (len(self.text), None, self.text.splitlines(keepends=True), self.file)
        exec(compile(self.text, self.file, "exec"), vars(module))


_texts: dict[str, str] = {}  # of each FILE.py that has been run


def _module_of(file: Path, text: str) -> Any:
    """The file as a module, run once per process. It can import modules of its folder, after installed ones.

    Where the file is a program that trains, the module holds what is defined before it does.
    """
    name = f"{file.stem}_{hashlib.sha256(f'{file}{text}'.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, loader=_Text(str(file), text))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    _search_after_installed(file.parent)
    sys.modules[name] = module
    _texts[str(file)] = text
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


def spec_of(thing: Any) -> str:
    """The name of an object for the run's record: FILE.py:NAME of the program itself, or module:NAME."""
    module, name = getattr(thing, "__module__", "__main__"), getattr(thing, "__qualname__", type(thing).__name__)
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file and file.endswith(".py"):  # no other file can be named by an option
        return f"{Path(file).absolute()}:{name.rpartition('.')[2].strip('<>')}"
    return f"{module}:{name.rpartition('.')[2].strip('<>')}"
