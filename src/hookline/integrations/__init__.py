"""Adapters for other people's trainers; each imports its trainer when it is first used."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
