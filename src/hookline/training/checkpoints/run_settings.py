"""Compare the settings of a run with those of its checkpoint; `Saving` calls `differences`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["differences", "plain"]

_MAY_GROW: Final = ("epochs", "steps")
"""A run may be asked to go on for longer."""
_DEEPEST: Final = 20
_NOT_THERE: Final = "(not there)"


def plain(config: Any, depth: int = 0) -> Any:
    """Return a configuration as dictionaries, lists, numbers and texts; of anything else, its type."""
    if depth > _DEEPEST:  # it may contain itself
        return "…"
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    elif callable(getattr(config, "model_dump", None)):
        config = config.model_dump()
    if isinstance(config, Mapping):
        return {str(key): plain(value, depth + 1) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value, depth + 1) for value in config]
    if isinstance(config, (set, frozenset)):
        return sorted((plain(value, depth + 1) for value in config), key=repr)
    if isinstance(config, Path):
        return str(config)
    if type(config).__name__ in ("dtype", "device"):
        return str(config)
    inside = getattr(config, "__dict__", None)
    if inside and not callable(config):
        return {name: plain(value, depth + 1) for name, value in inside.items() if not name.startswith("_")}
    return f"a {getattr(config, '__qualname__', None) or type(config).__qualname__}"


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Return a line for each setting that differs: ``lr: 0.1 → 0.2``."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        names = [*saved, *(name for name in now if name not in saved)]
        return [
            line
            for name in names
            for line in differences(
                saved.get(name, _NOT_THERE), now.get(name, _NOT_THERE), f"{path}.{name}" if path else str(name)
            )
        ]
    if saved == now or (isinstance(saved, float) and isinstance(now, float) and math.isnan(saved) and math.isnan(now)):
        return []
    if path.rpartition(".")[2] in _MAY_GROW and _is_number(saved) and _is_number(now) and now > saved:
        return []
    return [f"{path or 'config'}: {_shown(saved)} → {_shown(now)}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return value if value is _NOT_THERE else repr(value)
