"""Run hooks for one request alone: on its rows of the batch, from its first forward to its last.

An engine prepares them when a request asks for hooks, opens them when it begins to run, and closes them when it has
ended. They are hooks of the engine's `LiveHooks` with an owner: a `LiveHook` of a request is called with its rows, and
what it returns replaces these rows. Only tensors with a row for each token are shown; a hook of a request never gets a
number of another.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.engines.live_hooks import LiveHook, LiveHooks, finite_metrics
from hookline.engines.request_options import ClientHook, remembered
from hookline.errors import EngineBusy, HooklineError, NotAllowedError, OptionError
from hookline.factories import FILE_OPTIONS
from hookline.messages import type_name
from hookline.observe.tokens import Tokens, current_tokens, serving
from hookline.specs.apply_specs import call_factory, close_hook, find_sites
from hookline.specs.hook_spec import HookSpec
from hookline.tree import children, map_tensors, rebuilt

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MOST_PLACES", "PreparedHooks", "RequestHooks", "ready_name"]

MOST_PLACES: Final = 4096
"""Hooks times modules, over the answers of all requests that wait or run. Attaching, calling and removing a hook takes
a part of a millisecond for each, in which no other request gets a token."""
_READY: Final = "hookline.factories"


class RequestHooks:
    """The hooks of single requests on one model.

    Args:
        model: The served model.
        live: The hooks of its engine, among which they are while they are open.
        outputs: Modules whose output has a row for each token, by name; None if the engine does not know.
        inputs: Modules that take a row for each token in the order of the batch, by name; hooks on others are shown no
            tensors that go in. None if the engine does not know: then the number of rows decides.
    """

    def __init__(
        self,
        model: nn.Module,
        live: LiveHooks,
        *,
        outputs: Container[str] | None = None,
        inputs: Container[str] | None = None,
    ) -> None:
        self._live = live
        self._outputs = outputs
        self._inputs = inputs
        self._lock = threading.Lock()
        self._held = 0
        """Hooks times modules of all requests that were prepared and are not closed."""
        self._names = remembered(partial(_names, model))

    def prepare(
        self, id: str, specs: Sequence[ClientHook], allow: Sequence[str] | None = None, *, answers: int = 1
    ) -> PreparedHooks:
        """Return the hooks of the request `id`, made and not attached; raise for what a request may not ask.

        Raises `EngineBusy` while the hooks of other requests leave no room for these.

        Args:
            id: The engine's own id of the request. Not a name that clients choose, where others can have the same.
            specs: The hooks.
            allow: What paths of other factories may begin with.
            answers: How many answers the client asked for together, each with these hooks.
        """
        for spec in specs:
            _check_allowed(spec, allow)
        names = [self._names(spec.target_modules, spec.exclude) for spec in specs]
        places = sum(map(len, names))
        if places * answers > MOST_PLACES:
            raise OptionError(
                f"The hooks of this request are on {places} modules, for {answers} answers: together "
                f"{places * answers}, and {MOST_PLACES} is the most. Name fewer modules or hooks, or ask for fewer "
                "answers at once."
            )
        self._hold(places)
        prepared = PreparedHooks(self._live, partial(self._hold, -places))
        try:
            for spec, found in zip(specs, names, strict=True):
                prepared.hooks.append(self._made(id, spec, found, [_READY, *(allow or ())]))
        except BaseException:
            prepared.close()
            raise
        return prepared

    def _hold(self, places: int) -> None:
        """Count hooks that are made, or with a negative number closed; raise if there is no room for them."""
        with self._lock:
            if places > 0 and self._held + places > MOST_PLACES:
                raise EngineBusy(
                    f"The hooks of all requests would be on {self._held + places} modules, and {MOST_PLACES} is the "
                    "most. Try again later, or name fewer modules or hooks."
                )
            self._held += places

    def _made(self, id: str, given: ClientHook, found: Sequence[str], allow: Sequence[str]) -> LiveHook:
        """Return the hook of a spec, checked, for the modules in `found` that have rows of requests."""
        names = tuple(name for name in found if self._outputs is None or name in self._outputs)
        if not names:
            asked = ", ".join(map(repr, found))
            raise OptionError(f"{asked}: no module of these has an output with a row for each token.")
        spec = HookSpec(
            name=given.name or re.split("[:.]", given.hook_factory)[-1],
            target_modules=names,
            observe=given.observe,
            every=given.every,
            on_error=given.on_error,
        )
        hook = _called(given, allow)
        try:
            live = LiveHook.of(spec, hook, self._live.widths, "http", RequestRows(id, self._inputs))
            live.check_sites(names)
        except BaseException:
            close_hook(hook)
            raise
        return live


class PreparedHooks:
    """The hooks of one request, made; attached between `open` and `close`."""

    def __init__(self, live: LiveHooks, let_go: Callable[[], None]) -> None:
        self.hooks: list[LiveHook] = []
        self._live = live
        self._let_go: Callable[[], None] | None = let_go
        self._is_open = False

    def open(self) -> None:
        """Attach them, all or none; called when the request begins to run."""
        self._live.attach([(live.spec, partial(_itself, live)) for live in self.hooks])
        self._is_open = True

    def close(self) -> list[dict[str, Any]]:
        """Remove them, and return what they did and found; of a request that has never run, nothing."""
        hooks, self.hooks = self.hooks, []
        try:
            self._live.detach(hooks)
        finally:
            if self._let_go is not None:
                self._let_go()
            self._let_go = None
        return [_found(live) for live in hooks] if self._is_open else []


def _itself(live: LiveHook, config: dict[str, Any]) -> LiveHook:
    return live


def _names(model: nn.Module, patterns: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of modules that match."""
    found = find_sites(model, HookSpec(target_modules=patterns, exclude=exclude), strict=True)
    return () if found is None else tuple(found.names)


def _found(live: LiveHook) -> dict[str, Any]:
    """Return what a hook did, and its metrics, as plain data."""
    assert isinstance(live.owner, RequestRows)
    return {
        "name": live.name,
        "matched": list(live.matched),
        "rows": live.owner.seen,
        "errors": live.errors,
        "last_error": live.last_error,
        "metrics": finite_metrics(live.metrics()),
    }


# -- what a request may ask ----------------------------------------------------------------------------------------


def ready_name(path: str) -> str | None:
    """Return the name of the ready-made factory that ``path`` means; None for any other path.

    The package has more in it than factories, and a prefix would let all of that through.
    """
    dotted = path.replace(":", ".")
    if dotted != _READY and not dotted.startswith(f"{_READY}."):
        return None
    name = dotted.removeprefix(_READY).removeprefix(".")
    if name in FILE_OPTIONS:
        return name
    known = ", ".join(f"{_READY}:{each}" for each in FILE_OPTIONS)
    raise NotAllowedError(f"{path!r} is no factory that clients may name; there are {known}.")


def _check_allowed(spec: ClientHook, allow: Sequence[str] | None) -> None:
    """Raise for what requests may not ask.

    They come from anybody, so a spec may name a factory of `hookline.factories`, without files, or one that starts with
    an entry of ``allow``.
    """
    if spec.on != "forward":
        raise OptionError(f"Hooks of a request are on='forward', got {spec.on!r}.")
    name = ready_name(spec.hook_factory)
    if name is None:
        path, prefixes = spec.hook_factory.replace(":", "."), [each.replace(":", ".") for each in allow or ()]
        if not any(path == each or path.startswith(f"{each}.") for each in prefixes):
            raise NotAllowedError(
                f"A request may not name {spec.hook_factory!r}; it may name factories of {_READY}"
                f"{' and what begins with ' + ', '.join(prefixes) if prefixes else ''}."
            )
    else:
        files = [option for option in FILE_OPTIONS[name] if spec.config.get(option) is not None]
        if files or "folder" in FILE_OPTIONS[name]:
            raise NotAllowedError(f"{name} has files, and a hook of a request gets none; attach it to the engine.")


def _called(spec: HookSpec, allow: Sequence[str]) -> Any:
    """Return the hook that the factory of `spec` makes; raise what is wrong with it as one of our errors."""
    path = spec.hook_factory
    try:
        # Checked again, now that its module is imported: what that has from elsewhere is not meant by a prefix.
        hook = call_factory(path, spec.config, allow, observe=spec.observe)
    except HooklineError:
        raise
    except Exception as error:  # the factory's own, or that of importing it
        said = str(error).strip().rstrip(".")
        raise OptionError(f"{path} made no hook: {type(error).__name__}{f': {said}' if said else ''}.") from error
    if hook is None:
        raise OptionError(f"{path} returned None, so there is no hook.")
    return hook


# -- a hook that sees the rows of one request ----------------------------------------------------------------------


class RequestRows:
    """The rows of one request, forward by forward: the owner of its hooks."""

    def __init__(self, request: str, inputs: Container[str] | None) -> None:
        self.seen = 0
        """How many rows its hook has seen."""
        self._request = request
        self._inputs = inputs
        self._last: tuple[Tokens | None, _Rows | None] = (None, None)
        """The table of the last forward, and the rows in it: all modules of a forward have the same."""

    def run(self, hook: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...], name: str, *, edits: bool) -> Any:
        """Call ``hook`` with the rows alone; return the output with the rows as it has edited them, None without.

        Rows of others stay as they are, to the last bit.
        """
        module, inputs, output = args
        batch = current_tokens()
        if self._last[0] is not batch:
            self._last = batch, _rows_of(batch, self._request)
        rows = self._last[1]
        if rows is None:
            return None
        self.seen += rows.own.count
        with serving(rows.own):
            are_rows = self._inputs is None or name in self._inputs
            own = _part(output, rows)
            edited = hook((module, _part(inputs, rows if are_rows else None), own))
        return _with_part(output, own if edited is None else edited, rows) if edits else None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one request in the running forward."""

    batch: Tokens
    row: int
    own: Tokens
    """The table of these rows alone."""

    def cut(self, tensor: Tensor) -> Tensor | None:
        """Return the rows as a view of `tensor`; None if it has no row for each token."""
        batch, shape = self.batch, tuple(tensor.shape)
        begin, length = batch.begins[self.row], batch.lengths[self.row]
        if batch.width is not None and shape[:2] == (len(batch.requests), batch.width) and len(shape) in (2, 3):
            return tensor[self.row : self.row + 1, batch.width - length :]
        has_rows = shape[:1] in ((batch.count,), (batch.room,)) and (batch.width is None or len(shape) == 2)
        return tensor[begin : begin + length] if has_rows else None


def _rows_of(batch: Tokens | None, key: str) -> _Rows | None:
    """Return the rows of the request with that key in the batch of a forward; None if it has none."""
    keys = () if batch is None else batch.keys or batch.requests
    if batch is None or key not in keys:
        return None
    row = keys.index(key)
    return _Rows(batch, row, batch.of_request(row))


def _part(value: Any, rows: _Rows | None) -> Any:
    """Return `value` with the rows of the request alone; None stands for what has no such rows, a cache for example.

    The rows are a copy: a view has the whole batch in its storage. With `rows` None, nothing has such rows.
    """

    def cut(path: str, tensor: Tensor) -> Tensor | None:
        own = None if rows is None else rows.cut(tensor)
        return None if own is None else own.clone()

    return map_tensors(value, cut, lambda leaf: leaf if isinstance(leaf, bool | int | float | str) else None)


def _with_part(value: Any, edited: Any, rows: _Rows) -> Any:
    """Return `value` with the rows of the request from `edited`, which has the structure that `_part` gave."""
    if isinstance(value, Tensor):
        return _with_rows(value, edited, rows)
    parts = children(value)
    if parts is None:
        return value
    new = dict(children(edited) or ())
    if len(new) != len(parts):
        raise OptionError(f"A hook of a request returned {type_name(edited)} in place of {type_name(value)}.")
    return rebuilt(value, {key: _with_part(child, new[key], rows) for key, child in parts})


def _with_rows(value: Tensor, edited: Any, rows: _Rows) -> Tensor:
    own = rows.cut(value)
    if own is None:
        return value
    if not isinstance(edited, Tensor) or edited.shape != own.shape:
        found = tuple(edited.shape) if isinstance(edited, Tensor) else type_name(edited)
        raise OptionError(f"A hook of a request returned {found} in place of rows of shape {tuple(own.shape)}.")
    changed = value.clone()
    place = rows.cut(changed)
    assert place is not None
    place.copy_(edited)
    return changed
