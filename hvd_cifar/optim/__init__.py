"""Optimizers, learning rate schedules and averages of weights. They do not depend on ranks."""
