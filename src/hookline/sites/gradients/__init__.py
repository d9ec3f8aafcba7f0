"""Observe and edit the gradients of one call of a module or function."""
