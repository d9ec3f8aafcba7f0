"""Add hookline to engines of vLLM that somebody else starts; an entry point of ``vllm.general_plugins``.

vLLM calls `register` in each of its processes. Without ``HOOKLINE_VLLM=1`` or ``HOOKLINE_VLLM_HOOKS=FILE`` in the
environment it does nothing and imports nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["register"]


def register() -> None:
    """Have every engine that this process configures use `HookExtension`, beside another extension if it has one."""
    is_on = os.environ.get("HOOKLINE_VLLM", "").lower() not in ("", "0", "false", "no", "off")
    if not is_on and not os.environ.get("HOOKLINE_VLLM_HOOKS"):
        return
    import functools
    import sys

    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if arguments is None or hasattr(arguments.create_engine_config, "_hookline_wraps"):
        return  # a process of the engine: its configuration has been made
    original = arguments.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        parallel = config.parallel_config
        parallel.worker_extension_cls = with_hooks(parallel.worker_extension_cls)
        return config

    create_engine_config._hookline_wraps = original  # type: ignore[attr-defined]
    arguments.create_engine_config = create_engine_config


def with_hooks(extension: str | None) -> str:
    """Return the path of an extension class that has the methods of hookline, and those of ``extension``."""
    from hookline.engines.vllm.start_options import EXTENSION, combined_path

    if not extension:
        return EXTENSION
    is_ours = extension.startswith("hookline.engines.vllm.")
    return extension if is_ours else combined_path(extension)
