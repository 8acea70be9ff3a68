"""This project beside others that train the same net: `python -m benchmarks.peers`."""
