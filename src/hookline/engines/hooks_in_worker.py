"""Help hooks live in the worker of an engine: run acts between its steps, tell where a hook is silent.

The folders of the engines call these beside the server's `LiveHooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hookline.sites.receipt import likely_cause

if TYPE_CHECKING:
    from hookline.serve.live_hooks import LiveHook

__all__ = ["at_once", "probe_action", "silent_sites"]

T = TypeVar("T")


def at_once(act: Callable[[], T]) -> Future[T]:
    """Run ``act`` at once, for `LiveHooks`: a worker takes calls between its steps only."""
    done: Future[T] = Future()
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)
    return done


def silent_sites(live: LiveHook) -> dict[str, str]:
    """Return the modules where a hook has not fired although the model ran, each with the likely cause."""
    attachment = live.handle._attachment
    entries = [each for each in attachment.members() if not each.fired and each.counter.step > each.step_at_attach]
    return {each.name: likely_cause(each, attachment) for each in entries}


def probe_action(spec: Mapping[str, Any]) -> str | None:
    """Return the ``action`` of a spec whose factory is ``probe``; None for any other."""
    is_probe = str(spec.get("hook_factory")).replace(":", ".").rpartition(".")[2] == "probe"
    return (spec.get("config") or {}).get("action") if is_probe else None
