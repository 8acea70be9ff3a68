"""The `benchmark` command: measure a training step and an all-reduce."""
