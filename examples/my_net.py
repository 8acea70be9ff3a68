"""A net of your own: `./run.sh -np 2 train --model examples/my_net.py:build`."""

import keras
from keras import layers

from hvd_cifar import Recipe


def build(image_shape: tuple[int, int, int], classes: int) -> keras.Model:
    """From float images [b, height, width, channels] to logits [b, classes]."""
    images = x = keras.Input(image_shape)
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))  # Keras's 0.99 is too slow for short runs
        x = layers.MaxPooling2D()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes)(x))


def build_with_recipe(image_shape: tuple[int, int, int], classes: int) -> tuple[keras.Model, Recipe]:
    """The same net with a recipe of its own."""
    return build(image_shape, classes), Recipe(optimizer=keras.optimizers.Adam, learning_rate=1e-3, epochs=5)
