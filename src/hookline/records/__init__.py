"""The log of a run, and what reads it: records, the base class of sinks, the fan-out, replay."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
