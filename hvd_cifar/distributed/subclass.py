"""Changes of a Keras object's behaviour that keep its state and its saved form."""

from __future__ import annotations

from typing import Any

import keras

_PUBLIC = {"keras.layers": keras.layers, "keras.optimizers": keras.optimizers}


def put_in_front(mixin: type, instance: Any, **attributes: Any) -> None:
    """Change the class of an instance to a new subclass of it, whose methods come from `mixin` first.

    All state stays. A saved model holds the name, module and registration of the original class, and so loads without
    this package.

    Args:
        attributes: class attributes of the new class.
    """
    plain = type(instance)
    name = plain.__name__
    module = next((path for path, room in _PUBLIC.items() if getattr(room, name, None) is plain), plain.__module__)
    names = {"__module__": module, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    made = type(name, (mixin, plain), {**names, **attributes})
    package, separator, registered = keras.saving.get_registered_name(plain).partition(">")
    for kind in (made, plain) if separator else ():  # both get the name; loading takes the last one
        keras.saving.register_keras_serializable(package, registered)(kind)
    # Keras's own __setattr__ would track the class as part of the object's state.
    object.__setattr__(instance, "__class__", made)
