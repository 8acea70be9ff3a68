"""`OwnLayer`: what the layers of this package share."""

from __future__ import annotations

from typing import Any, ClassVar

import keras


class OwnLayer(keras.layers.Layer):
    """A layer whose output has the shape of its input, unless it says otherwise.

    Attributes:
        SETTINGS: the constructor's arguments, which are attributes, as Keras saves them.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Keras asks for it while it builds a model."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """The layer's settings. Without this method Keras refuses a dtype that is a policy."""
        return {**super().get_config(), **{name: getattr(self, name) for name in self.SETTINGS}}
