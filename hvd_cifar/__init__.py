"""Data-parallel training on CIFAR-10 with TensorFlow and Horovod: one process per GPU or core."""

__version__ = "0.1.0"
