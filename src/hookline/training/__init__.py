"""Hooks over time: hook classes, the manager that fires them, training loops, checkpoints."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
