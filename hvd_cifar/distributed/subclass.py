"""Changing what an object of Keras does, and neither its state nor what is saved of it."""

from __future__ import annotations

from typing import Any

import keras

_PUBLIC = {"keras.layers": keras.layers, "keras.optimizers": keras.optimizers}


def put_in_front(mixin: type, instance: Any, **attributes: Any) -> None:
    """Make the class of an instance a subclass of its own that looks for methods in `mixin` first.

    All state stays. A saved model holds the name, module and registration of the class as it was, which loads without
    this package.

    Args:
        attributes: of the new class.
    """
    plain = type(instance)
    name = keras.saving.get_registered_name(plain)
    module = next((path for path, room in _PUBLIC.items() if getattr(room, name, None) is plain), plain.__module__)
    names = {"__module__": module, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    # Keras's own __setattr__ tracks what it is given.
    object.__setattr__(instance, "__class__", type(name, (mixin, plain), {**names, **attributes}))
