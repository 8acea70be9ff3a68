"""What Horovod's own names do under Keras 3, with the arguments and the meanings that Horovod's documentation gives.

Horovod's modules, as set-up patches them (`horovod-0.28.1-keras3.patch`), call what is here.
"""
