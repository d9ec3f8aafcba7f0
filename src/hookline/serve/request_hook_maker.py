"""Check and make the hooks that a request brings along, before the engine accepts it.

`Engine.submit` calls `RequestHookMaker` from any thread; the engine's loop opens and closes the `PreparedHooks` that
the request then carries. What is wrong with a hook is told at once, not when the request has waited for its turn.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineError, OptionError
from hookline.serve.counted_hooks import check_width
from hookline.serve.request_hooks import MadeForRequest, RequestHooks

if TYPE_CHECKING:
    from torch import nn

    from hookline.serve.live_hooks import LiveHooks
    from hookline.specs.hook_spec import HookSpec

__all__ = ["PreparedHooks", "RequestHookMaker"]


class PreparedHooks:
    """The hooks of one request, made and not yet attached."""

    def __init__(self, running: RequestHooks, id: str, specs: Sequence[HookSpec]) -> None:
        self._running = running
        self._id = id
        self._specs = specs
        self._is_begun = False

    def open(self) -> None:
        """Attach them, all or none; called when the request begins to run."""
        self._is_begun = True
        self._running.open(self._id, self._specs)

    def close(self) -> list[dict[str, Any]]:
        """Remove them, and return what they did; of a request that has never run, nothing."""
        if self._is_begun:
            return self._running.close(self._id)
        _close(self._specs)
        return []


class RequestHookMaker:
    """Make the hooks of requests to one engine.

    Args:
        model: The served model.
        live: What attaches and removes them.
        widths: How many numbers the output of a module has for a token; other modules have no rows of requests.
        inputs: Modules that take a row for each token.
        is_compiled: Whether any part of the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        live: LiveHooks,
        widths: Mapping[str, int],
        inputs: Container[str],
        *,
        is_compiled: bool,
    ) -> None:
        self._running = RequestHooks(model, live, inputs)
        self._widths = widths
        self._is_compiled = is_compiled

    def prepare(
        self, id: str, specs: Sequence[Mapping[str, Any]], allow: Sequence[str], *, answers: int = 1
    ) -> PreparedHooks | None:
        """Return the hooks of the request `id`, None for none; raise if one of them cannot be had."""
        if not specs:
            return None
        if self._is_compiled:  # each request would have the model compiled again, and the others wait
            raise OptionError(
                "This engine runs compiled code, in which a request has no hooks of its own. Attach the hook to the "
                "engine, with requests=[...] in its config, and give the request a name that is among them."
            )
        confined = self._running.confine(id, specs, allow, answers=answers)
        try:
            return PreparedHooks(self._running, id, [self._made(spec) for spec in confined])
        except BaseException:
            _close(confined)
            raise

    def _made(self, spec: HookSpec) -> HookSpec:
        """Return `spec` on the modules that have rows of requests, with its hook made and checked."""
        names = [name for name in spec.target_modules if name in self._widths]
        if not names:
            asked = ", ".join(map(repr, spec.target_modules))
            raise OptionError(f"{asked}: no module of these has an output with a row for each token.")
        factory = spec.hook_factory
        assert isinstance(factory, MadeForRequest)
        check_width(_call(factory, spec.config), names, self._widths)
        return replace(spec, target_modules=tuple(names))


def _call(factory: MadeForRequest, config: Mapping[str, Any]) -> Any:
    try:
        hook = factory(dict(config))
    except HooklineError:
        raise
    except Exception as error:  # the factory's own, or that of importing it
        said = str(error).strip().rstrip(".")
        raise OptionError(f"{factory} made no hook: {type(error).__name__}{f': {said}' if said else ''}.") from error
    if hook is None:
        raise OptionError(f"{factory} returned None, so there is no hook.")
    return hook


def _close(specs: Sequence[HookSpec]) -> None:
    for spec in specs:
        if isinstance(spec.hook_factory, MadeForRequest):
            spec.hook_factory.close()
