"""Offer ready hooks by path: for hookline's own specs, and SGLang's ``--forward-hooks``.

Recipe::

    {"target_modules": ["model.layers.*"], "hook_factory": "hookline.factories:activation_stats", "config": {}}

Each factory takes the ``config`` of a spec and returns one hook, which may be on many modules. Names are imported when
first used.
"""

from __future__ import annotations

from hookline._lazy import lazy_names

FILE_OPTIONS: dict[str, tuple[str, ...]] = {
    "activation_stats": (),
    "export": ("folder",),
    "nan_alarm": (),
    "steer": ("file",),
    "replace_rows": ("file",),
    "probe": ("file",),
}
"""Which keys of each factory's config are paths: a server that takes specs from strangers limits where they point."""

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__all__ += ["FILE_OPTIONS"]
