"""Offer hooks as methods of vLLM's workers: ``--worker-extension-cls hookline.engines.vllm.extension.HookExtension``.

vLLM imports this module in each worker when it is named so, and calls the methods by ``collective_rpc``. `VllmHooks`
and the HTTP routes call them for users. All of them take and return plain data, and return errors instead of raising
them: of an exception in a worker only its text arrives.

An engine takes one extension class: to have the methods of another as well, derive a class from both.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookline.engines.vllm.start_options import StartOptions
from hookline.errors import OptionError

__all__ = ["HookExtension", "watch_loading"]

logger = logging.getLogger("hookline.engines.vllm")


class HookExtension:
    """Methods that every worker of an engine gets.

    Recipe::

        llm = LLM("models/tiny", worker_extension_cls="hookline.engines.vllm.extension.HookExtension")
        llm.collective_rpc("hookline_list")
    """

    def hookline_describe(self) -> dict[str, Any]:
        """Return what kind of engine it is, and how many steps and tokens hooks could see."""
        return _answer(self, lambda hooks: {"engine": hooks.describe()})

    def hookline_add(
        self,
        specs: Sequence[Mapping[str, Any]],
        allow: Sequence[str] | None = None,
        strict: bool = True,
        origin: Any = "http",
    ) -> dict[str, Any]:
        """Attach hooks, all or none, and return them."""

        def add(hooks: Any) -> dict[str, Any]:
            added = hooks.add(specs, allow=allow, strict=strict, origin=origin)
            return {"hooks": [hooks.shown(live) for live in added]}

        return _answer(self, add)

    def hookline_list(self) -> dict[str, Any]:
        """Return the hooks with what they have done."""
        return _answer(self, lambda hooks: {"hooks": hooks.list()})

    def hookline_remove(self, id: str) -> dict[str, Any]:
        """Remove a hook and return it."""

        def remove(hooks: Any) -> dict[str, Any]:
            shown = next((each for each in hooks.list() if each["id"] == id), None)
            hooks.session.live.remove(id)
            return {"hook": shown}

        return _answer(self, remove)

    def hookline_metrics(self) -> dict[str, Any]:
        """Return the metrics of each hook by its id."""
        return _answer(self, lambda hooks: {"metrics": hooks.session.live.metrics()})

    def hookline_take(self, key: str) -> dict[str, Any]:
        """Return what the requests under a key, or the one that the client gave an id, asked for; forget it."""
        return _answer(self, lambda hooks: {"answers": hooks.results.take(key)})

    def hookline_take_flags(self, name: str) -> dict[str, Any]:
        """Return what probes flagged in a request, by the id that the client gave; forget it."""
        return _answer(self, lambda hooks: {"flags": hooks.results.take_flags(name)})


def _answer(worker: Any, act: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``act`` gives, or its error as plain data, with the rank of the worker."""
    rank = int(getattr(worker, "rank", 0))
    try:
        return {"rank": rank, **act(_hooks_of(worker))}
    except Exception as error:
        from hookline.engines.request_results import error_to_plain

        logger.info("a call of hookline failed", exc_info=error)
        return {"rank": rank, "error": error_to_plain(error)}


def _hooks_of(worker: Any) -> Any:
    """Return the hooks of a worker, made at the first call if the start of the engine has not made them."""
    found = worker.__dict__.get("_hookline_hooks")
    if found is None:
        from hookline.engines.vllm.worker_hooks import WorkerHooks

        options = StartOptions.read(worker.vllm_config.additional_config)
        try:
            found = WorkerHooks(worker, options)
        except AttributeError as error:
            version = getattr(sys.modules.get("vllm"), "__version__", "unknown")
            raise OptionError(
                f"This engine (vLLM {version}) is built otherwise than those that hookline knows ({error}); no hook "
                "can be attached. docs/engines.md has the versions that were tested."
            ) from error
        worker.__dict__["_hookline_hooks"] = found
    return found


# -- the start of an engine --------------------------------------------------------------------------------------


def watch_loading() -> None:
    """Have workers with this extension attach the hooks of the start once their model is loaded; may be called again.

    An extension is a last base of the worker's class, so that it cannot override ``load_model``.
    """
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    worker: Any = getattr(module, "Worker", None)
    if worker is None or hasattr(worker.load_model, "_hookline_wraps"):
        return
    original = worker.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(self, HookExtension):
            _start(self)
        return result

    load_model._hookline_wraps = original  # type: ignore[attr-defined]
    worker.load_model = load_model


def _start(worker: Any) -> None:
    """Attach the hooks that the engine was started with when it has warmed up: those numbers are no one's."""
    from hookline.runs.documents import specs_of_file

    try:
        hooks = _hooks_of(worker)
    except OptionError as error:
        if not isinstance(error.__cause__, AttributeError):
            raise
        logger.error("%s", error)  # the engine lives on, and every call of hookline is answered with this
        return
    file = hooks.options.hooks
    specs = [] if file is None else specs_of_file(file)
    warm_up, shutdown = worker.compile_or_warm_up_model, worker.shutdown

    @functools.wraps(warm_up)
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        if specs:
            hooks.add(specs, strict=False, origin="start")
        return result

    @functools.wraps(shutdown)
    def shutdown_after_hooks(*args: Any, **kwargs: Any) -> Any:
        try:
            hooks.close()  # exports are written to the end
        except Exception:
            logger.exception("hooks could not be closed")
        return shutdown(*args, **kwargs)

    worker.compile_or_warm_up_model = compile_or_warm_up_model
    worker.shutdown = shutdown_after_hooks


watch_loading()
