"""Set-up: an environment in `.venv`, the packages of setup.cfg, and Horovod, which is built once per user.

It runs on the user's bare Python, before anything is installed, and so imports only the standard library.
"""
