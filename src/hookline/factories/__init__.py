"""Ready hooks for whoever takes a path to a factory: hookline's own specs, and SGLang's ``--forward-hooks``.

Recipe::

    {"target_modules": ["model.layers.*"], "hook_factory": "hookline.factories:activation_stats", "config": {}}

Each factory takes the ``config`` of a spec and hands back one hook, which may sit on many modules. Names are imported
when first used, so that the row table of a serving engine costs no more than itself.
"""

from __future__ import annotations

from hookline._lazy import lazy_names

FILE_OPTIONS: dict[str, tuple[str, ...]] = {
    "activation_stats": ("file",),
    "export": ("folder",),
    "nan_alarm": (),
    "log_shapes": (),
    "steer": ("file",),
    "record_mean": ("file",),
}
"""Which keys of each factory's config are paths: who takes specs from strangers has to say where these may point."""

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__all__ += ["FILE_OPTIONS"]
