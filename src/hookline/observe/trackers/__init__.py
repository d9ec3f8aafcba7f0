"""Trackers: what source 003 keeps of activations and gradients, component by component."""
