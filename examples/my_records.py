"""Images in a TFRecord file, read by index: `./run.sh -np 2 train --dataset examples/my_records.py:load`.

Any object whose item i is image i will do, such as a source of grain or array_record. The order stays the program's, so
shards, resume and the same result on any number of ranks hold. HVD_CIFAR_TRAIN and HVD_CIFAR_TEST name the files, also
on other hosts, which get variables of such names; each record is a tf.train.Example with an encoded `image` and an
integer `label`.
"""

import hashlib
import os
import struct
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_cifar

SIDE = 64  # pixels


class Records:
    """A TFRecord file with an index: item i is image i, uint8 [SIDE, SIDE, 3]."""

    def __init__(self, path: str) -> None:
        self.file, self.index, place, state = os.open(path, os.O_RDONLY), [], 0, hashlib.sha256()
        while head := os.pread(self.file, 8, place):  # a record: length, checksum of 4 bytes, content, its checksum
            (length,) = struct.unpack("<Q", head)
            self.index.append((place + 12, length))
            state.update(head + os.pread(self.file, 4, place + 12 + length))
            place += length + 16
        self.labels = np.array([self.example(i)["label"].int64_list.value[0] for i in range(len(self))])
        self.digest = state.hexdigest()  # stands for all images; without it every rank reads them once at the start

    def example(self, number: int) -> Any:
        place, length = self.index[number]
        return tf.train.Example.FromString(os.pread(self.file, length, place)).features.feature

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
        image = tf.io.decode_image(self.example(number)["image"].bytes_list.value[0], 3, expand_animations=False)
        return tf.cast(tf.round(tf.image.resize(image, (SIDE, SIDE), antialias=True)), tf.uint8).numpy()


def load() -> hvd_cifar.Dataset:
    train, test = Records(os.environ["HVD_CIFAR_TRAIN"]), Records(os.environ["HVD_CIFAR_TEST"])
    return hvd_cifar.Dataset.from_arrays(train, train.labels, test, test.labels, name="records")
