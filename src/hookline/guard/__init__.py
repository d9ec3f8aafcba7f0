"""Undo what a hook did to a run: snapshot, rollback, random streams."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
