"""Check a hook of your own: ``hookline.testing.check_hook(MyHook)``, in a test."""

from __future__ import annotations

from hookline._lazy import lazy_names

# Names are imported when first used: pytest imports this package at each start, for the fixture `no_leaked_hooks`.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
