"""Optimizers, learning rate schedules and averages of weights. They know nothing of ranks."""
