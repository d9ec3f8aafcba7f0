"""Observe and change what flows through a model: what the verbs of ``hookline`` return, and tools beside them.

The verbs ``watch``, ``capture`` and ``patch`` are at the top: ``hookline.capture(model)``.
"""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
