"""Show a live hook as plain data, as ``GET /hooks`` has it, on every engine.

The HTTP routes, the workers of vLLM and the reports of SGLang call `hook_to_json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.factories import FILE_OPTIONS

if TYPE_CHECKING:
    from hookline.engines.live_hooks import LiveHook
    from hookline.specs.hook_spec import HookSpec

__all__ = ["hook_to_json", "shown_config"]

_READY: Final = "hookline.factories"
_MOST_NUMBERS: Final = 16
"""A list of more numbers is shown by its first ones: the vector of `steer` has thousands."""
_FIRST: Final = 4


def hook_to_json(hook: LiveHook, export_dir: Path | None = None) -> dict[str, Any]:
    """Return a live hook as ``GET /hooks`` shows it; the location of the export folder stays hidden."""
    spec = hook.spec
    return {
        "id": hook.id,
        "name": hook.name,
        "hook_factory": _path_of(spec),
        "target_modules": list(spec.target_modules),
        "on": spec.on,
        "observe": spec.observe,
        "every": spec.every,
        "on_error": spec.on_error,
        "config": shown_config(_path_of(spec), spec.config, export_dir),
        "matched": list(hook.matched),
        "origin": hook.origin,
        "fired": hook.fired,
        "last_step": hook.last_step,
        "cost_us": hook.cost_us,
        "errors": hook.errors,
        "off": hook.off,
        "last_error": hook.last_error,
    }


def _path_of(spec: HookSpec) -> str:
    factory = spec.hook_factory
    if factory is None or isinstance(factory, str):
        return factory or ""
    return f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', type(factory).__name__)}"


def shown_config(factory: str, config: Mapping[str, Any], export_dir: Path | None) -> dict[str, Any]:
    """Return the configuration of a hook; paths in the export folder are relative to it, as they were sent."""
    found: dict[str, Any] = _plain(dict(config))
    if export_dir is None:
        return found
    name, root = factory.replace(":", ".").removeprefix(f"{_READY}."), export_dir.resolve()
    for option in FILE_OPTIONS.get(name, ()):
        given = found.get(option)
        if isinstance(given, str) and Path(given).is_relative_to(root):
            found[option] = str(Path(given).relative_to(root))
    return found


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it: a configuration from YAML may hold infinities and dates, a vector many numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > _MOST_NUMBERS and all(isinstance(each, int | float) for each in value):
            return [*map(_plain, value[:_FIRST]), f"… {len(value) - _FIRST} more"]
        return [_plain(each) for each in value]
    is_number = isinstance(value, float) and math.isfinite(value)
    return value if is_number or value is None or isinstance(value, str | int) else str(value)
