"""Audit hooks: train with and without them, and say which one changes the run."""
