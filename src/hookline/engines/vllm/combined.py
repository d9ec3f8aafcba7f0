"""Make one class of `HookExtension` and another worker extension: an engine of vLLM takes only one.

vLLM looks up ``hookline.engines.vllm.combined.trl/scripts/vllm_serve/WeightSyncWorkerExtension``; `engine_options` and
the plugin write such paths. The part behind the module is the path of the other class, with slashes.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from hookline.errors import OptionError

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if "/" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _combined(name.replace("/", "."))


@lru_cache
def _combined(path: str) -> type:
    """Return the class that has the methods of both; raise if a name is in both."""
    from hookline.engines.vllm.extension import HookExtension

    module, _, name = path.rpartition(".")
    other = getattr(importlib.import_module(module), name)
    if issubclass(other, HookExtension):
        return other  # type: ignore[no-any-return]
    twice = sorted(each for each in vars(HookExtension) if not each.startswith("__") and hasattr(other, each))
    if twice:
        raise OptionError(f"{path} and HookExtension both have {', '.join(twice)}, so that they cannot be combined.")
    return type(f"Hooked{name}", (HookExtension, other), {})
