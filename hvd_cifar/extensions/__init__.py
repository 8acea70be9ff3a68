"""What a run does besides training, one file for each thing. The core knows none of them.

An extension is a module of this package with

- `make(run)`, which returns its `Callback`, or None where the run does not use it;
- `Settings`, where it has options: a subclass of `fields.Settings`. Its fields become options of `train`.

It may use `Run`, `TrainState` and `StepObserver`, as any callback. Its module imports no TensorFlow, since the command
line reads the options. A run without one of these files is the same run without the feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import create_model

if TYPE_CHECKING:
    from hvd_cifar.training.callbacks import Callback, Run

# In the order in which callbacks are called. Names in capitals are those of the core (`train.assemble`).
ORDER = (
    "unlike_ranks",
    "example_ledger",
    "LOG",
    # After ledger and log line, so that each step in the copy is on record; before slow callbacks, to lose less.
    "elastic_copies",
    "replica_check",
    "EVALUATE",
    "confusion",
    "SAVE",
    "remote_evaluation",  # waits for its last results: by then the last step is saved
    "best_weights",
    "stragglers",
    "SUM UP",
)


def _module(name: str) -> ModuleType | None:
    """The extension; None where its file is not there."""
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as failure:
        if failure.name != f"{__name__}.{name}":
            raise
        return None


def _modules() -> dict[str, ModuleType]:
    return {name: module for name in ORDER if name.islower() and (module := _module(name))}


def with_settings(name: str, base: type[Any]) -> type[Any]:
    """A class of settings: those of `base`, and the options of all extensions."""
    own = [module.Settings for module in _modules().values() if hasattr(module, "Settings")]
    return create_model(name, __base__=(base, *own), __doc__=base.__doc__)


def in_order(run: Run, core: Mapping[str, Callback]) -> list[Callback]:
    """The callbacks of a run: those of the core, by their names in `ORDER`, and of the extensions that it uses."""
    modules = _modules()
    made = (core.get(name) or (modules[name].make(run) if name in modules else None) for name in ORDER)
    return [callback for callback in made if callback]
