"""Work with the ranks of a distributed run: who is who, and statistics and metrics of all ranks as one."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
