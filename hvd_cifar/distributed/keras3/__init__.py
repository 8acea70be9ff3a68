"""Horovod's own names under Keras 3: what its modules call, as `horovod-0.28.1-keras3.patch` changes them."""
