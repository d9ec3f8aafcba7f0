"""Register with SGLang what attaches hooks to a loaded model, and what runs around its forwards and captures.

The plugin calls `install`; SGLang's ``HookRegistry`` wraps its own functions with those of this file. In SGLang
``--forward-hooks`` are registered after the capture and are silent in every forward that replays a graph. Here hooks
are on before the capture, stay out of what it records, and forwards run eagerly while there is a hook.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from hookline.engines.sglang.runner_hooks import SglangHooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.engines.sglang.sglang_options import SglangOptions

__all__ = ["AROUND_CAPTURE", "CAN_RUN_GRAPH", "RUNNER", "hooks_of_runner", "install"]

logger = logging.getLogger("hookline.engines.sglang")

RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_SETUP: Final = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
AROUND_CAPTURE: Final = (f"{_SETUP}.capture_decode_graph", f"{_SETUP}.capture_prefill_graph")
"""The functions through which every capture goes, also a later one."""
CAN_RUN_GRAPH: Final = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
    "sglang.srt.model_executor.cpu_graph_runner.CPUGraphRunner.can_run_graph",
)
"""Who decides whether a forward replays a graph; planners of speculative decoding ask the same."""
_KNOWN_VERSION: Final = "0.5.23"

_HOOKS: WeakKeyDictionary[Any, SglangHooks] = WeakKeyDictionary()


def hooks_of_runner(runner: Any) -> SglangHooks | None:
    """Return the hooks of a model runner of this process; None if it has none."""
    return None if runner is None else _HOOKS.get(runner)


def install(options: SglangOptions) -> None:
    """Register everything with SGLang; its ``load_plugins`` applies it."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    add, kinds = registry.HookRegistry.register, registry.HookType

    def attach(result: Any, runner: Any) -> None:
        _attach(runner, options)

    add(f"{RUNNER}.load_model", attach, kinds.AFTER)
    add(f"{RUNNER}.forward", _around_forward, kinds.AROUND)
    for path in AROUND_CAPTURE:
        add(path, _around_capture, kinds.AROUND)
    for path in CAN_RUN_GRAPH:
        add(path, _unless_hooked, kinds.AFTER)
    found = _version()
    if found != _KNOWN_VERSION:
        logger.warning("SGLang %s is not known here; the plugin was written for %s", found, _KNOWN_VERSION)


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of an unknown version"


def _attach(runner: Any, options: SglangOptions) -> None:
    """Attach the hooks to the model that ``runner`` has loaded; whatever goes wrong, the engine goes on."""
    if getattr(runner, "is_draft_worker", False) or runner in _HOOKS:
        return
    try:
        hidden_size = getattr(getattr(runner, "model_config", None), "hidden_size", None)
        place = f"gpu{getattr(runner, 'gpu_id', 0)}"
        made = SglangHooks(runner.model, options, place=place, hidden_size=hidden_size)
        made.add(options.specs)
    except Exception:
        logger.exception("hooks cannot be attached; the engine goes on without them")
        return
    _HOOKS[runner] = made


def _around_forward(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = hooks_of_runner(runner)
    if hooks is None:
        return original(runner, *args, **kwargs)
    with hooks.during_forward(args[0] if args else kwargs.get("forward_batch")):
        return original(runner, *args, **kwargs)


def _around_capture(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hooks = hooks_of_runner(kwargs.get("model_runner"))
    if hooks is None:
        return original(*args, **kwargs)
    with hooks.during_capture():
        return original(*args, **kwargs)


def _unless_hooked(can_run: Any, graph_runner: Any, *args: Any, **kwargs: Any) -> bool | None:
    """Return False, in the place of SGLang's own answer, while a hook is on that a replay would pass over."""
    hooks = hooks_of_runner(getattr(graph_runner, "model_runner", None))
    return False if hooks is not None and hooks.needs_eager else None
