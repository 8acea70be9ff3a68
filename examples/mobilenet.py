"""A net of keras.applications, from random weights, on pictures of many sizes:

./run.sh -np 2 train --model examples/mobilenet.py:build --dataset folder:PATH --image-size 96 --sync-batch-norm
"""

import keras

from hvd_cifar import Recipe


def build(image_shape: tuple[int, int, int], classes: int) -> tuple[keras.Model, Recipe]:
    """MobileNetV2 with a recipe for some thousands of pictures."""
    net = keras.applications.MobileNetV2(
        image_shape, alpha=0.5, weights=None, classes=classes, classifier_activation=None
    )
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # Keras's 0.999 remembers thousands of steps
    return net, Recipe(optimizer=keras.optimizers.Adam, learning_rate=1e-3, weight_decay=1e-4, epochs=10)
