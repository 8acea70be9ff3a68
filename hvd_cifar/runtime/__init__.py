"""A rank's process: launcher's variables, devices, threads, transport, and the start of Horovod."""
