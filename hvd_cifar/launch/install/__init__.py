"""Set-up: an environment in `.venv`, the packages of setup.cfg, and Horovod, built once per user and kept.

Runs under the user's bare Python, before anything is installed: standard library only.
"""
