"""Run hooks for one request alone: on its rows of the batch, from its first forward to its last.

The engine's loop, and the workers of other engines, open them when a request begins that asks for hooks, and close them
when it has ended. Any factory will do: the hook is called with the rows of that request, and what it returns replaces
these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import HooklineError, NotAllowedError, OptionError
from hookline.factories import FILE_OPTIONS
from hookline.factories.factory_hook import FactoryHook
from hookline.observe.tokens import current_tokens, serving
from hookline.serve.counted_hooks import finite_metrics
from hookline.serve.request_rows import NO_ROWS, RowsOfRequest, part_of, rows_of_request, with_part
from hookline.sites.signature import changes_in_place, check_hook, may_return_value
from hookline.specs.apply_specs import call_factory, close_hook, find_sites
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from torch import nn

    from hookline.serve.live_hooks import LiveHook, LiveHooks
    from hookline.sites.site_info import Site

__all__ = ["MOST_HOOKS", "HookOfRequest", "MadeForRequest", "RequestHooks", "confined_spec", "harmless_spec"]

MOST_HOOKS: Final = 64
"""Of one request."""
MOST_PLACES: Final = 4096
"""Hooks times modules times answers of one request. Attaching, calling and removing a hook takes a part of a
millisecond for each, in which no other request gets a token."""
_MOST_REMEMBERED: Final = 32
_READY: Final = "hookline.factories"


class RequestHooks:
    """The hooks of single requests on one model.

    Args:
        model: The served model.
        live: What attaches and removes them; its hooks are of requests alone.
        inputs: Modules that take a row for each token in the order of the batch, by name; hooks on others are shown no
            tensors that go in. None if the engine does not know: then the number of rows decides.
    """

    def __init__(self, model: nn.Module, live: LiveHooks, inputs: Container[str] | None = None) -> None:
        self._live = live
        self._inputs = inputs
        # The answers of one request, which come one by one, have the same patterns.
        self._names = lru_cache(maxsize=_MOST_REMEMBERED)(partial(_names, model))
        self._running: dict[str, list[LiveHook]] = {}
        """The hooks of each running request, by the engine's own id."""

    @property
    def is_active(self) -> bool:
        """Return whether a running request has hooks that are on."""
        return any(not live.off for hooks in self._running.values() for live in hooks)

    def confine(
        self, id: str, specs: Sequence[Mapping[str, Any]], allow: Sequence[str] | None = None, *, answers: int = 1
    ) -> list[HookSpec]:
        """Return the specs of a request for `open`; raise for what a request may not ask.

        Args:
            id: The engine's own id of the request. Not a name that clients choose, where others can have the same.
            specs: The hooks.
            allow: What paths of other factories may begin with.
            answers: How many answers the client asked for together, each with these hooks.
        """
        if len(specs) > MOST_HOOKS:
            raise OptionError(f"A request may have {MOST_HOOKS} hooks, got {len(specs)}.")
        confined = [self._on_names(confined_spec(spec, id, allow, self._inputs)) for spec in specs]
        places = sum(len(spec.target_modules) for spec in confined)
        if places * answers > MOST_PLACES:
            raise OptionError(
                f"The hooks of this request are on {places} modules, for {answers} answers: together "
                f"{places * answers}, and {MOST_PLACES} is the most. Name fewer modules or hooks, or ask for fewer "
                "answers at once."
            )
        return confined

    def _on_names(self, spec: HookSpec) -> HookSpec:
        """Return `spec` with the names of the modules that its patterns match."""
        found = self._names(spec.target_modules, spec.exclude)
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return replace(spec, target_modules=found, exclude=())

    def open(self, id: str, confined: Sequence[HookSpec]) -> None:
        """Attach the hooks of a request, all or none."""
        self._running[id] = self._live.add_all(confined, allow=None, strict=True)

    def close(self, id: str) -> list[dict[str, Any]]:
        """Remove the hooks of a request, and return what they did and found; nothing of them is kept."""
        hooks = self._running.pop(id, [])
        for live in hooks:
            self._live.remove(live.id)
        return [_found(live) for live in hooks]

    def clear(self) -> None:
        """Remove the hooks of all requests."""
        for id in list(self._running):
            self.close(id)


def _names(model: nn.Module, patterns: tuple[str, ...], exclude: tuple[str, ...]) -> Any:
    """Return the names of modules that match, or the error to raise: it took as long, and is remembered too."""
    try:
        found = find_sites(model, HookSpec(target_modules=patterns, exclude=exclude), strict=True)
    except HooklineError as error:
        return error
    return () if found is None else tuple(found.names)


def confined_spec(
    given: Mapping[str, Any],
    request: str,
    allow: Sequence[str] | None,
    inputs: Container[str] | None = None,
) -> HookSpec:
    """Return the spec of a hook that sees the rows of one request alone.

    Requests come from anybody, so a spec may name a factory of `hookline.factories`, without files, or one that starts
    with an entry of ``allow``. An error in the hook never leaves the model's forward: it would end the engine.

    Args:
        given: The spec as it came.
        request: The engine's own id of the request.
        allow: What paths of other factories may begin with.
        inputs: See `RequestHooks`.
    """
    checked = HookSpec.from_dict(harmless_spec(given))
    path = checked.hook_factory
    if not isinstance(path, str):
        raise OptionError("A hook of a request needs hook_factory, such as 'hookline.factories:steer'.")
    if checked.on != "forward":
        raise OptionError(f"Hooks of a request are on='forward', got {checked.on!r}.")
    _check_allowed(path, checked.config, allow)

    name = checked.name or path.rpartition(":")[2].rpartition(".")[2]
    return replace(
        checked,
        name=name,
        hook_factory=MadeForRequest(checked, allow, partial(_confined, request=request, inputs=inputs)),
    )


class MadeForRequest:
    """The factory of a hook of one request: it makes the hook once, at the first call."""

    def __init__(self, spec: HookSpec, allow: Sequence[str] | None, confine: Callable[[Any], HookOfRequest]) -> None:
        self._spec = spec
        self._allow = [_READY, *(allow or ())]
        self._confine = confine
        self._made: HookOfRequest | None = None

    def __call__(self, config: dict[str, Any]) -> HookOfRequest | None:
        """Return the hook, which sees the rows of the request alone."""
        if self._made is None:
            # Checked again, now that its module is imported: what that has from elsewhere is not meant by a prefix.
            hook = call_factory(self._spec.hook_factory, config, self._allow, observe=self._spec.observe)
            self._made = None if hook is None else self._confine(hook)
        return self._made

    def __str__(self) -> str:  # in messages
        return str(self._spec.hook_factory)

    def close(self) -> None:
        """Close the hook of a request that has never run."""
        if self._made is not None:
            close_hook(self._made)


def harmless_spec(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec of a client with its ``on_error``, ``"disable"`` if left out; refuse what could stop the engine."""
    on_error = given.get("on_error")
    if on_error not in (None, "disable", "warn"):
        raise OptionError(f"on_error is 'disable' or 'warn' for a hook of a client, got {on_error!r}.")
    return {**given, "on_error": on_error or "disable"}


def _check_allowed(path: str, config: Mapping[str, Any], allow: Sequence[str] | None) -> None:
    dotted = path.replace(":", ".")
    name = dotted.removeprefix(f"{_READY}.")
    if name in FILE_OPTIONS and dotted.startswith(f"{_READY}."):
        files = [option for option in FILE_OPTIONS[name] if config.get(option) is not None]
        if files or "folder" in FILE_OPTIONS[name]:
            raise NotAllowedError(f"{name} has files, and a hook of a request gets none; attach it to the engine.")
        return
    prefixes = [each.replace(":", ".") for each in allow or ()]
    usable = [each for each, options in FILE_OPTIONS.items() if "folder" not in options]
    if not any(dotted == each or dotted.startswith(f"{each}.") for each in prefixes if each != _READY):
        raise NotAllowedError(
            f"A request may not name {path!r}; it may name {', '.join(f'{_READY}:{each}' for each in usable)}"
            f"{', or what begins with ' + ', '.join(prefixes) if prefixes else ''}."
        )


def _confined(hook: Any, request: str, inputs: Container[str] | None) -> HookOfRequest:
    wants_site = check_hook(hook, HookSpec().kind_and_site_type[0], site_type=HookSpec().kind_and_site_type[1])
    kind = _EditOfRequest if may_return_value(hook) or changes_in_place(hook) else _ObserverOfRequest
    return kind(hook, request, inputs, wants_site)


class HookOfRequest(FactoryHook):
    """Call a hook with the rows of one request."""

    def __init__(self, hook: Any, request: str, inputs: Container[str] | None, wants_site: bool) -> None:
        self.hook = hook
        self._inputs = inputs
        if isinstance(hook, FactoryHook):
            self.name, self.width = hook.name, hook.width
        self._request = request
        self._wants_site = wants_site
        self._last: tuple[Any, RowsOfRequest | None] = (None, None)
        """The table of the last forward, and the rows in it: all modules of a forward have the same."""
        self.rows = 0
        """How many rows it has seen."""

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics of the hook."""
        found = getattr(self.hook, "to_metrics", None)
        return dict(found()) if callable(found) else {}

    def expect(self, names: Iterable[str]) -> None:
        """Tell the hook the modules that it is on."""
        if isinstance(self.hook, FactoryHook):
            self.hook.expect(names)

    def close(self) -> None:
        """Close the hook, if it can be."""
        close = getattr(self.hook, "close", None)
        if callable(close):
            close()

    def _run(self, module: nn.Module, inputs: Any, output: Any, site: Site) -> tuple[RowsOfRequest | None, Any]:
        """Return the rows of the request, and what the hook makes of them: what it returns, or changes in place."""
        batch = current_tokens()
        if self._last[0] is not batch:
            self._last = batch, rows_of_request(batch, self._request)
        rows = self._last[1]
        if rows is None:
            return None, None
        self.rows += rows.own.count
        with serving(rows.own):
            options = {"site": site} if self._wants_site else {}
            are_rows = self._inputs is None or site.name in self._inputs
            shown, own = part_of(inputs, rows if are_rows else NO_ROWS), part_of(output, rows)
            edited = self.hook(module, shown, own, **options)
            return rows, own if edited is None else edited


class _ObserverOfRequest(HookOfRequest):
    """Observe the rows of one request."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site) -> None:
        """Observe the rows."""
        self._run(module, inputs, output, site)


class _EditOfRequest(HookOfRequest):
    """Edit the rows of one request; those of others stay as they are, to the last bit."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site) -> Any:
        """Return the output with the rows that the hook returned or changed; None if the request has none here."""
        rows, edited = self._run(module, inputs, output, site)
        return None if rows is None else with_part(output, edited, rows)


def _found(live: LiveHook) -> dict[str, Any]:
    """Return what a hook did, and its metrics, as plain data."""
    hook = live.hook
    try:
        metrics = finite_metrics(hook.to_metrics())
    except Exception as error:
        live.counted.policy.count(live.counted.name, error, "in to_metrics")
        metrics = {}
    return {
        "name": live.name,
        "matched": list(live.matched),
        "rows": hook.rows,
        "errors": live.errors,
        "last_error": live.last_error,
        "metrics": metrics,
    }
