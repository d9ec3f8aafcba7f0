"""Run hooks for one request alone: on its rows of the flat batch, from its first step to its last.

`WorkerHooks` opens them when a request begins that asks for hooks, and closes them when it has ended. Any factory will
do: the hook is called with the rows of that request, and what it returns replaces these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.engines.vllm.step_rows import StepTable
from hookline.errors import NotAllowedError, OptionError
from hookline.factories import FILE_OPTIONS
from hookline.factories.batch_rows import TokenBatch, current_batch, serving
from hookline.sites.signature import check_hook, may_return_value
from hookline.specs.apply_specs import call_factory
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from torch import nn

    from hookline.serve.live_hooks import LiveHook, LiveHooks
    from hookline.sites.site_info import Site

__all__ = ["RequestHooks", "confined_spec", "harmless_spec", "rows_of_request"]

_READY: Final = "hookline.factories"


class RequestHooks:
    """The hooks of single requests in one worker."""

    def __init__(self, live: LiveHooks) -> None:
        self._live = live
        self._running: dict[str, list[LiveHook]] = {}
        """The hooks of each running request, by the engine's own id."""

    @property
    def is_active(self) -> bool:
        """Return whether a running request has hooks that are on."""
        return any(not live.off for hooks in self._running.values() for live in hooks)

    def open(self, id: str, specs: Sequence[Mapping[str, Any]], allow: tuple[str, ...] | None) -> None:
        """Attach the hooks of a request, all or none.

        Args:
            id: The engine's own id of the request. A name would not do: clients choose those.
            specs: The hooks.
            allow: What paths of other factories may begin with.
        """
        confined = [confined_spec(spec, id, allow) for spec in specs]
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


def confined_spec(given: Mapping[str, Any], request: str, allow: tuple[str, ...] | None) -> HookSpec:
    """Return the spec of a hook that sees the rows of one request alone.

    Requests come from anybody, so a spec may name a factory of `hookline.factories`, without files, or one that starts
    with an entry of ``allow``. An error in the hook never leaves the model's forward: it would end the engine.

    Args:
        given: The spec as it came.
        request: The engine's own id of the request.
        allow: What paths of other factories may begin with.
    """
    checked = HookSpec.from_dict(harmless_spec(given))
    path = checked.hook_factory
    if not isinstance(path, str):
        raise OptionError("A hook of a request needs hook_factory, such as 'hookline.factories:steer'.")
    if checked.on != "forward":
        raise OptionError(f"Hooks of a request are on='forward', got {checked.on!r}.")
    _check_allowed(path, checked.config, allow)

    def make(config: dict[str, Any]) -> Any:
        # Again here, where its module is imported: what that has imported from elsewhere is not meant by a prefix.
        hook = call_factory(path, config, [_READY, *(allow or ())], observe=checked.observe)
        return None if hook is None else _confined(hook, request)

    name = checked.name or path.rpartition(":")[2].rpartition(".")[2]
    return replace(checked, name=name, hook_factory=make)


def harmless_spec(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec of a client with its ``on_error``, ``"disable"`` if left out; refuse what could stop the engine."""
    on_error = given.get("on_error")
    if on_error not in (None, "disable", "warn"):
        raise OptionError(f"on_error is 'disable' or 'warn' for a hook of a client, got {on_error!r}.")
    return {**given, "on_error": on_error or "disable"}


def _check_allowed(path: str, config: Mapping[str, Any], allow: tuple[str, ...] | None) -> None:
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


@dataclass(frozen=True)
class _RequestRows:
    """The rows of one request in the running step."""

    begin: int
    end: int
    total: int
    """How many rows the step has for all requests."""
    table: TokenBatch
    """Of these rows alone."""


def rows_of_request(batch: Any, request: str) -> _RequestRows | None:
    """Return the rows of a request in the flat batch of a step, by the engine's own id; None if it has none."""
    if not isinstance(batch, StepTable) or request not in batch.ids or not isinstance(batch.request_ids, tuple):
        return None
    row = batch.ids.index(request)
    lengths = [1] * len(batch.ids) if batch.lengths is None else [int(each) for each in batch.lengths]
    begin = sum(lengths[:row])
    end = begin + lengths[row]
    phase = batch.phase if batch.phases is None else batch.phases[row]
    own = TokenBatch(
        input_ids=None if batch.input_ids is None else batch.input_ids[begin:end],
        positions=None if batch.positions is None else batch.positions[begin:end],
        lengths=(lengths[row],),
        request_ids=(batch.request_ids[row],),
        phase=phase,
    )
    return _RequestRows(begin, end, sum(lengths), own)


def _confined(hook: Any, request: str) -> Any:
    wants_site = check_hook(hook, HookSpec().kind_and_site_type[0], site_type=HookSpec().kind_and_site_type[1])
    kind = _EditOfRequest if may_return_value(hook) else _ObserverOfRequest
    return kind(hook, request, wants_site)


class _HookOfRequest:
    """Call a hook with the rows of one request."""

    def __init__(self, hook: Any, request: str, wants_site: bool) -> None:
        self.hook = hook
        self._request = request
        self._wants_site = wants_site
        self.rows = 0
        """How many rows it has seen."""

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics of the hook."""
        found = getattr(self.hook, "to_metrics", None)
        return dict(found()) if callable(found) else {}

    def close(self) -> None:
        """Close the hook, if it can be."""
        close = getattr(self.hook, "close", None)
        if callable(close):
            close()

    def _run(self, module: nn.Module, inputs: Any, output: Any, site: Site | None) -> tuple[_RequestRows | None, Any]:
        """Return the rows of the request, and what the hook returns for them."""
        rows = rows_of_request(current_batch(), self._request)
        if rows is None:
            return None, None
        self.rows += rows.end - rows.begin
        own = _sliced(output, rows)
        with serving(rows.table):
            options = {"site": site} if self._wants_site else {}
            return rows, self.hook(module, inputs, own, **options)


class _ObserverOfRequest(_HookOfRequest):
    """Observe the rows of one request."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Observe the rows."""
        self._run(module, inputs, output, site)


class _EditOfRequest(_HookOfRequest):
    """Edit the rows of one request; those of others stay as they are, to the last bit."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the rows that the hook returned; None if it returned nothing."""
        rows, edited = self._run(module, inputs, output, site)
        return None if rows is None or edited is None else _with_rows(output, edited, rows)


def _sliced(value: Any, rows: _RequestRows) -> Any:
    """Return the rows of the request of each tensor that has a row for each token."""
    if type(value) is tuple:
        return tuple(_sliced(each, rows) for each in value)
    has_rows = isinstance(value, Tensor) and value.dim() and value.shape[0] >= rows.total
    return value[rows.begin : rows.end] if has_rows else value


def _with_rows(value: Any, edited: Any, rows: _RequestRows) -> Any:
    """Return ``value`` with the rows of the request from ``edited``."""
    if type(value) is tuple and isinstance(edited, list | tuple) and len(edited) == len(value):
        return tuple(_with_rows(old, new, rows) for old, new in zip(value, edited, strict=True))
    if not isinstance(value, Tensor) or not isinstance(edited, Tensor) or not value.dim():
        return value
    changed = value.clone()
    changed[rows.begin : rows.end] = edited
    return changed


def _found(live: LiveHook) -> dict[str, Any]:
    """Return what a hook did, and its metrics, as plain data."""
    hook = live.hook
    try:
        metrics = {name: float(value) for name, value in hook.to_metrics().items()}
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
