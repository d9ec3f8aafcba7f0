"""Train an experiment, save it, resume it: loops, checkpoints, the embedded experiment."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
