"""Offer hooks as methods of vLLM's workers: ``--worker-extension-cls hookline.engines.vllm.extension.HookExtension``.

vLLM imports this module in each worker when it is named so, and calls the methods by ``collective_rpc``. `VllmHooks`
and the HTTP routes call them for users; each asks the `WorkerHooks` of its worker. All of them take and return plain
data, and return errors instead of raising them: of an exception in a worker only its text arrives.

An engine takes one extension class: to have the methods of another as well, derive a class from both.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from hookline.engines.request_results import error_to_plain
from hookline.engines.vllm.start_options import StartOptions, wrap
from hookline.engines.vllm.worker_hooks import WorkerHooks
from hookline.errors import OptionError

__all__ = ["HookExtension", "watch_loading"]

logger = logging.getLogger("hookline.engines.vllm")

_P = ParamSpec("_P")
_Method = Callable[Concatenate[Any, _P], dict[str, Any]]


def _answering(method: _Method[_P]) -> _Method[_P]:
    """Have a method return the rank of its worker too, and an error as plain data."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> dict[str, Any]:
        rank = int(getattr(self, "rank", 0))
        try:
            return {"rank": rank, **method(self, *args, **kwargs)}
        except Exception as error:
            logger.info("a call of hookline failed", exc_info=error)
            return {"rank": rank, "error": error_to_plain(error)}

    return call


class HookExtension:
    """Methods that every worker of an engine gets.

    Recipe::

        llm = LLM("models/tiny", worker_extension_cls="hookline.engines.vllm.extension.HookExtension")
        llm.collective_rpc("hookline_list")
    """

    @_answering
    def hookline_describe(self) -> dict[str, Any]:
        """Return what kind of engine it is, and how many steps and tokens hooks could see."""
        return {"engine": _hooks_of(self).describe()}

    @_answering
    def hookline_add(
        self,
        specs: Sequence[Mapping[str, Any]],
        allow: Sequence[str] | None = None,
        strict: bool = True,
        origin: Any = "http",
    ) -> dict[str, Any]:
        """Attach hooks, all or none, and return them."""
        return {"hooks": _hooks_of(self).add(specs, allow=allow, strict=strict, origin=origin)}

    @_answering
    def hookline_list(self) -> dict[str, Any]:
        """Return the hooks with what they have done."""
        return {"hooks": _hooks_of(self).list()}

    @_answering
    def hookline_remove(self, id: str) -> dict[str, Any]:
        """Remove a hook and return it."""
        return {"hook": _hooks_of(self).remove(id)}

    @_answering
    def hookline_metrics(self) -> dict[str, Any]:
        """Return the metrics of each hook by its id."""
        return {"metrics": _hooks_of(self).session.live.metrics()}

    @_answering
    def hookline_take(self, key: str) -> dict[str, Any]:
        """Return what was found for the requests under a key, or for the one that has that id; forget it."""
        return {"answers": _hooks_of(self).results.take(key)}


def _hooks_of(worker: Any) -> WorkerHooks:
    """Return the hooks of a worker, made at the first call if the start of the engine has not made them."""
    found: WorkerHooks | None = worker.__dict__.get("_hookline_hooks")
    if found is None:
        try:
            found = WorkerHooks(worker, StartOptions.read(worker.vllm_config.additional_config))
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
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    if worker is not None:
        wrap(worker, "load_model", after=_start)


def _start(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """Attach the hooks that the engine was started with when it has warmed up: those numbers are no one's."""
    from hookline.runs.documents import specs_of_file

    if not isinstance(worker, HookExtension):
        return
    try:
        hooks = _hooks_of(worker)
    except OptionError as error:
        if not isinstance(error.__cause__, AttributeError):
            raise
        logger.error("%s", error)  # the engine lives on, and every call of hookline is answered with this
        return
    file = hooks.options.hooks
    specs = [] if file is None else specs_of_file(file)
    if specs:
        wrap(worker, "compile_or_warm_up_model", after=lambda *_: hooks.add(specs, strict=False, origin="start"))
    wrap(worker, "shutdown", before=lambda *_, **__: hooks.close())  # exports are written to the end


watch_loading()
