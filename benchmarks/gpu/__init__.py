"""What GPUs need measured, in one command: python -m benchmarks.gpu."""
