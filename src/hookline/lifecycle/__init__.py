"""Hooks over time: hook classes, the registry, the manager that fires them, and the context that they are shown."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
