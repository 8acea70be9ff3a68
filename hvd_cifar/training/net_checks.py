"""Checks of a net before its first step: it is the same on all ranks, and each trainable variable has a gradient."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.training.callbacks import Run, StepObserver

RECIPE = "its recipe"  # the numbers; a resumed run may have others
MOST_NAMED = 3  # variables in a message


class MissingGradients(StepObserver):
    """Tells of trainable variables on which the loss does not depend. All of them: `UserError`, the same on all ranks.

    The step's graph is traced before the first step, so nothing has been trained by then.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.told = run, False

    def on_unconnected(self, variables: Sequence[Any]) -> None:
        """Refuse the net, or print a note, once a run."""
        named = ", ".join(v.path for v in variables[:MOST_NAMED]) + ", ..." * (len(variables) > MOST_NAMED)
        if len(variables) == len(self.run.model.trainable_variables):
            raise UserError(
                f"--model {self.run.settings.model}: no trainable variable has a gradient ({named}): the loss does not "
                "depend on them; take out what cannot be differentiated, such as a cast to integers or an argmax"
            )
        if not self.told:
            self.run.say(f"note: the loss does not depend on {named}: training does not change them, except by decay")
        self.told = True


def structure(run: Run) -> dict[str, str]:
    """What this rank has built: a digest of each layer and operation by its name, of the recipe and the optimizer.

    A digest covers class, settings, shapes and types of weights, and the layers whose outputs are the inputs.
    """
    work, inner = run.work, run.optimizer
    while hasattr(inner, "inner_optimizer"):  # a loss scale wraps it
        inner = inner.inner_optimizer
    parts = {
        RECIPE: repr((work.plan, work.settings.learning_rate, work.recipe.weight_decay, work.recipe.ema_decay)),
        "its optimizer": inner.name + re.sub('"learning_rate": [^,}]*', "", _settings_of(inner)),
    }
    for number, part in enumerate(_parts_of(run.model)):
        sources = [[t._keras_history.operation.name for t in node.input_tensors] for node in part._inbound_nodes]
        weights = [(v.path, v.shape, v.dtype, v.trainable) for v in getattr(part, "variables", ())]
        name = f"{part.name} ({type(part).__name__})"
        name += f" [{number}]" if name in parts else ""  # models in the model may have layers of the same name
        parts[name] = f"{_settings_of(part)} {weights} {sources}"
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in parts.items()}


def _parts_of(model: keras.Model) -> list[Any]:
    """Each layer and operation once; a model in the model after its parts."""
    parts: dict[int, Any] = {}
    for layer in reversed(model._flatten_layers()):
        own = getattr(layer, "operations", ()) if hasattr(layer, "_nodes") or isinstance(layer, keras.Model) else ()
        for part in (*own, layer):
            parts.setdefault(id(part), part)
    return [part for part in parts.values() if part is not model]


def _settings_of(part: Any) -> str:
    """The settings of a layer, operation or optimizer as text, which is the same on all ranks and in all processes."""
    if isinstance(part, keras.layers.Lambda):  # its settings hold its code with the file's path
        code = getattr(part.function, "__code__", None)
        return repr((code.co_code, code.co_names)) if code else repr(part.function)
    try:
        text = json.dumps(part.get_config(), default=repr, sort_keys=True)
    except Exception:  # a user's class, which need not have settings
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The name of the first part of `other` that `one` lacks, or has with another digest; None: they are equal."""
    wrong = [name for name, digest in other.items() if one.get(name) != digest]
    return next(iter([*wrong, *(name for name in one if name not in other)]), None)


def refuse_unlike(mine: Mapping[str, str], model: str) -> None:
    """UserError on all ranks where one has built another net than rank 0. A collective. `mine`: from `structure`."""
    if len(set(collectives.all_gather_object(json.dumps(mine)))) == 1:
        return
    first, *others = collectives.all_gather_object(mine)
    for rank, other in enumerate(others, 1):
        if name := first_difference(first, other):
            raise UserError(
                f"--model {model}: rank {rank} has built another net than rank 0: {name} differs; build the same net "
                "on every rank: let it depend on no rank, host, clock or random number of Python"
            )
