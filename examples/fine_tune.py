"""A net that starts from weights in a file, of which only a new last layer learns.

keras.applications.MobileNetV2((96, 96, 3), alpha=0.5, include_top=False, pooling="avg").save_weights(
"body.weights.h5") downloads ImageNet's weights and writes such a file. Then:

export HVD_CIFAR_WEIGHTS=body.weights.h5
./run.sh -np 2 train --model examples/fine_tune.py:build --dataset folder:PATH --image-size 96
"""

import os

import horovod.tensorflow as hvd
import keras

from hvd_cifar import Recipe


def build(image_shape: tuple[int, int, int], classes: int) -> tuple[keras.Model, Recipe]:
    """A frozen MobileNetV2 and a head. Rank 0 reads the file; training begins with its weights on all ranks."""
    body = keras.applications.MobileNetV2(image_shape, alpha=0.5, weights=None, include_top=False, pooling="avg")
    if hvd.is_initialized() and hvd.rank() == 0:  # `predict` and `export` have the weights from the checkpoint
        body.load_weights(os.environ["HVD_CIFAR_WEIGHTS"])
    body.trainable = False
    images = keras.Input(image_shape)
    halved = keras.layers.Rescaling(0.5)(images)  # a deviation of 1 becomes that of the images that it learned from
    logits = keras.layers.Dense(classes, name="head")(body(halved))
    recipe = Recipe(decayed=lambda variable: variable.path == "head/kernel", weight_decay=1e-3, epochs=5)
    return keras.Model(images, logits), recipe
