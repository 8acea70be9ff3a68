"""The check that all ranks have built the same net, recipe and optimizer."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import keras

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.training.callbacks import Run


def refuse_unlike(run: Run) -> None:
    """UserError on all ranks where one has built another net than rank 0. A collective."""
    first, *others = collectives.all_gather_object(_digests(run))
    for rank, other in enumerate(others, 1):
        if name := next((name for name in {**other, **first} if first.get(name) != other.get(name)), None):
            raise UserError(
                f"--model {run.work.model.name}: rank {rank} has built another net than rank 0: {name} differs; build "
                "the same net on every rank: let it depend on no rank, host, clock or random number of Python"
            )


def _digests(run: Run) -> dict[str, str]:
    """A digest of each layer by its name: class, settings, shapes and types of weights; of recipe and optimizer.

    The settings of a model, which comes after its layers, say how these are connected.
    """
    work, recipe = run.work, run.recipe
    parts = {
        "its recipe": repr((work.plan, work.settings.learning_rate, recipe.weight_decay, recipe.ema_decay)),
        "its optimizer": _settings_of(run.optimizer),
    }
    for number, layer in enumerate(reversed(run.model._flatten_layers())):
        name = f"{layer.name} ({type(layer).__name__})"
        name += f" [{number}]" if name in parts else ""  # models in the model may have layers of the same name
        parts[name] = f"{_settings_of(layer)} {[(v.path, v.shape, v.dtype, v.trainable) for v in layer.variables]}"
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in parts.items()}


def _settings_of(part: Any) -> str:
    """The settings of a layer or optimizer as text, which is the same on all ranks."""
    if isinstance(part, keras.layers.Lambda):  # its settings hold its code with the file's path
        code = getattr(part.function, "__code__", None)
        return repr((code.co_code, code.co_names)) if code else repr(part.function)
    try:
        text = json.dumps(part.get_config(), default=repr, sort_keys=True)
    except Exception:  # a user's class, which need not have settings
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
