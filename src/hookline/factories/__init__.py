"""Ready hooks for whoever takes a path to a factory: hookline's own specs, and SGLang's ``--forward-hooks``.

Recipe::

    {"target_modules": ["model.layers.*"], "hook_factory": "hookline.factories:activation_stats", "config": {}}

Each factory takes the ``config`` of a spec and hands back one hook, which may sit on many modules. Names are imported
when first used, so that the row table of a serving engine costs no more than itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.factories.activation_statistics import activation_stats as activation_stats
    from hookline.factories.alarm import nan_alarm as nan_alarm
    from hookline.factories.batch_rows import BatchRows as BatchRows
    from hookline.factories.batch_rows import current_rows as current_rows
    from hookline.factories.batch_rows import serving as serving
    from hookline.factories.exporting import export as export
    from hookline.factories.means import record_mean as record_mean
    from hookline.factories.read_export import read_export as read_export
    from hookline.factories.shape_log import log_shapes as log_shapes
    from hookline.factories.steering import steer as steer

__all__ = [
    "FILE_OPTIONS",
    "BatchRows",
    "activation_stats",
    "current_rows",
    "export",
    "log_shapes",
    "nan_alarm",
    "read_export",
    "record_mean",
    "serving",
    "steer",
]

FILE_OPTIONS: dict[str, tuple[str, ...]] = {
    "activation_stats": ("file",),
    "export": ("folder",),
    "nan_alarm": (),
    "log_shapes": (),
    "steer": ("file",),
    "record_mean": ("file",),
}
"""Which keys of each factory's config are paths: who takes specs from strangers has to say where these may point."""

_WHERE = {
    "BatchRows": "batch_rows",
    "activation_stats": "statistics",
    "current_rows": "batch_rows",
    "export": "exporting",
    "log_shapes": "shapes",
    "nan_alarm": "alarm",
    "read_export": "reading",
    "record_mean": "means",
    "serving": "batch_rows",
    "steer": "steering",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
