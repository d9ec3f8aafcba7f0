"""Attach and remove hooks on the model that is being served, between two forwards, and count what they do.

The engine has one `LiveHooks`; specs come from the start-up files and from HTTP, and go to ``register_hooks``. A spec
is attached wholly or not at all, and a hook that raises is switched off while requests go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from torch.utils.hooks import RemovableHandle

from hookline.errors import EngineBusy, EngineClosed, HookNameError, OptionError
from hookline.factories.factory_hook import FactoryHook
from hookline.serve.counted_hooks import CountedHook, CountingFactory
from hookline.serve.generation.row_batch import is_compiled
from hookline.sites.handle import HookHandle
from hookline.specs.apply_specs import close_hook, register_hooks
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LiveHook", "LiveHooks", "Origin"]

T = TypeVar("T")
Origin = Literal["start", "http"]
_Specs = Sequence[HookSpec | Mapping[str, Any]]


def _innermost(handle: RemovableHandle) -> Any:
    """Return the hook that the factory made; ``every`` wraps it."""
    assert isinstance(handle, HookHandle)
    hook: Any = handle._attachment.hook
    return hook if isinstance(hook, CountedHook) else hook.hook


class _Own(Enum):
    """Stands for the engine's own list of what may be named."""

    LIST = "the engine's own"


_Allow = Iterable[str] | None | _Own


class Between(Protocol):
    """Runs an act when no forward is running: `Engine.between`."""

    def __call__(self, act: Callable[[], T]) -> Future[T]: ...


@dataclass(frozen=True, eq=False)
class LiveHook:
    """A hook on a served model, and what it has done.

    Recipe::

        for hook in engine.hooks.list():
            print(hook.id, hook.matched, hook.fired, hook.last_error)

    Its figures are those of the moment they are read, also after it was removed.
    """

    id: str
    """``"h1"``, ``"h2"``, …; never used again."""
    spec: HookSpec
    """As it was given, but for ``on_error``."""
    matched: tuple[str, ...]
    """Names of the modules that it is on."""
    origin: Origin
    """Whether it came with the start or later, over HTTP."""
    hook: Any
    """What the factory made."""
    handle: HookHandle
    counted: CountedHook
    """What is known of it."""

    @property
    def name(self) -> str:
        """Return its name, for logs and metrics."""
        return self.counted.name

    @property
    def fired(self) -> int:
        """Return how often it was called, on all its modules together."""
        return self.handle.report().fired if self.counted.in_graph else self.counted.calls

    @property
    def last_step(self) -> int | None:
        """Return the forward of the model in which it was last due; None if it never was."""
        return self.handle.report().last_step

    @property
    def cost_us(self) -> float | None:
        """Return the microseconds of one call on the host; None before the first."""
        return self.counted.seconds / self.counted.calls * 1e6 if self.counted.calls else None

    @property
    def errors(self) -> int:
        """Return how often it raised."""
        return self.counted.errors

    @property
    def last_error(self) -> str | None:
        """Return the last exception, with its place."""
        return self.counted.last_error

    @property
    def off(self) -> bool:
        """Return whether an error has switched it off."""
        return self.counted.off

    @property
    def removed(self) -> bool:
        """Return whether it has been removed."""
        return self.handle.removed


def _in_time(done: Future[T], patience_s: float | None) -> T:
    """Return the result of an act between two forwards; take back one whose turn has not come in time."""
    try:
        return done.result(patience_s)
    except TimeoutError:
        if done.cancel():
            raise EngineBusy(f"The engine had no time for this within {patience_s:g} s; try again.") from None
        return done.result()  # it is being done, or the error is its own


_Hooks = list[LiveHook]  # `LiveHooks` has a method of that name
_Made = dict[int, CountingFactory | LiveHook]
"""Owners of hooks that are to be closed; each hook once, by its identity."""


class LiveHooks:
    """The hooks of an engine: `Engine.hooks`.

    Recipe::

        hook = engine.hooks.add({"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:nan_alarm"})
        print(hook.matched, hook.fired)
        engine.hooks.remove(hook.id)

    Every call may come from any thread; those that touch the model or ask a hook wait for the forward that is running.
    """

    def __init__(
        self,
        model: nn.Module,
        between: Between,
        *,
        allow: Iterable[str] | None,
        on_error: str = "disable",
        widths: Mapping[str, int] | None = None,
    ) -> None:
        self._model = model
        self._widths = widths or {}
        """How many numbers the output of a module has for a token, where that is known."""
        self._between = between
        self._allow = allow
        self._on_error = on_error
        self._is_compiled = is_compiled(model)
        self._live: dict[str, LiveHook] = {}
        self._made = 0
        self._is_closed = False
        self._lock = threading.RLock()
        """Held while hooks come and go: once the engine is over, any thread may do it at once."""
        self._closing: dict[threading.Event, int] = {}
        """The threads that are closing hooks, each with what says that it is done."""

    def add(
        self,
        spec: HookSpec | Mapping[str, Any],
        *,
        allow: _Allow = _Own.LIST,
        strict: bool = True,
        origin: Origin = "http",
        patience_s: float | None = None,
    ) -> LiveHook:
        """Attach one hook, wholly or not at all.

        Args:
            spec: A dictionary, in which ``on_error`` is the engine's unless it says otherwise; or a `HookSpec`, which
                is taken at its word.
            allow: What paths of factories may begin with, if not the engine's own list; None allows all.
            strict: Every pattern has to match; with False, one of them.
            origin: Where the spec came from.
            patience_s: How long to wait for the running forward; None waits to its end.

        Raises:
            NotAllowedError, NoMatchError, OptionError, ValueError, AttributeError, ImportError: As `register_hooks`.
            EngineBusy: The forward took longer than ``patience_s``; nothing is attached, now or later.
            OptionError: Its vector or head is not as long as the output of a module, where the engine knows that.
            Exception: Whatever the factory raises.
        """
        added = self.add_all([spec], allow=allow, strict=strict, origin=origin, patience_s=patience_s)
        if not added:
            raise OptionError("Nothing was attached: the spec is not enabled, or nothing matches (see the log).")
        return added[0]

    def add_all(
        self,
        specs: _Specs,
        *,
        allow: _Allow = _Own.LIST,
        strict: bool = False,
        origin: Origin = "start",
        patience_s: float | None = None,
    ) -> _Hooks:
        """Attach several hooks, all or none; without ``strict``, log and skip those that match nothing."""
        own = self._allow if isinstance(allow, _Own) else allow
        allowed = None if own is None else (own,) if isinstance(own, str) else tuple(own)
        return _in_time(self._between(lambda: self._add(specs, allowed, strict, origin)), patience_s)

    def remove(self, id: str, *, patience_s: float | None = None) -> LiveHook:
        """Remove one hook, and close what its factory made, unless another hook has the same.

        Raises:
            HookNameError: There is none of that id, or it is off already.
        """
        live, going = _in_time(self._between(lambda: self._remove(id)), patience_s)
        self._close_made(going)  # on this thread: the caller waits until all is written, forwards do not
        return live

    def list(self) -> _Hooks:
        """Return the attached hooks, oldest first."""
        return list(self._live.values())

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id; hooks without ``to_metrics`` are left out."""
        return self._between(self._metrics).result()

    def close(self) -> None:
        """Remove all hooks for good, the last first, and flush them."""
        with self._lock:
            self._is_closed = True
        while self._live:
            with self._lock:
                id = next(reversed(self._live), None)
                going = self._remove(id)[1] if id is not None else {}
            self._close_made(going)

    def wait_until_closed(self, patience_s: float | None = None) -> None:
        """Wait, `patience_s` for each, for removed hooks that other threads are closing."""
        for done, thread in tuple(self._closing.items()):
            if (
                thread != threading.get_ident()
            ):  # a hook that closes the engine in its own close must not wait for itself
                done.wait(patience_s)

    # -- between two forwards --------------------------------------------------------------------------------

    def _add(self, specs: _Specs, allow: tuple[str, ...] | None, strict: bool, origin: Origin) -> _Hooks:
        checked = [self._checked(spec) for spec in specs]
        factories = [CountingFactory(spec, allow, compiled=self._is_compiled, widths=self._widths) for spec in checked]
        ready = [
            replace(spec, hook_factory=factory, on_error="raise") if spec.hook_factory is not None else spec
            for spec, factory in zip(checked, factories, strict=True)
        ]
        try:
            with self._lock:
                if self._is_closed:
                    raise EngineClosed("The engine is closed, and takes no more hooks.")
                handles = register_hooks(self._model, ready, strict=strict)
                by_hook = {id(_innermost(handle)): handle for handle in handles}
                return [self._kept(made, by_hook, origin) for made in factories if id(made.counted) in by_hook]
        finally:  # of what was made and is not on, also if that is all of it
            self._close_made(self._not_on(factories))

    def _checked(self, spec: HookSpec | Mapping[str, Any]) -> HookSpec:
        if isinstance(spec, HookSpec):
            return spec
        is_said = not isinstance(spec, Mapping) or spec.get("on_error") is not None
        return HookSpec.from_dict(spec if is_said else {**spec, "on_error": self._on_error})

    def _kept(self, made: CountingFactory, handles: Mapping[int, Any], origin: Origin) -> LiveHook:
        handle = handles[id(made.counted)]
        assert made.counted is not None
        if isinstance(made.hook, FactoryHook):
            made.hook.expect(handle.names)
        self._made += 1
        key = f"h{self._made}"
        self._live[key] = LiveHook(key, made.spec, handle.names, origin, made.hook, handle, made.counted)
        return self._live[key]

    def _remove(self, id: str) -> tuple[LiveHook, _Made]:
        """Return the removed hook, and what has to be closed now."""
        with self._lock:
            live = self._live.pop(id, None)
            if live is None:
                raise HookNameError(f"No hook has the id {id!r}; {self._ids_text(id)}.")
            live.handle.remove(quiet=True)
            return live, self._not_on([live])

    def _ids_text(self, asked: str) -> str:
        """Return which ids there are, each with its name; those of the name `asked`, if there are such."""
        named = [live for live in self._live.values() if live.name == asked] or list(self._live.values())
        return f"there is {', '.join(f'{live.id!r} ({live.name})' for live in named) or 'none'}"

    def _not_on(self, owners: Sequence[CountingFactory | LiveHook]) -> _Made:
        """Return what factories made, except what a hook that stays on also uses."""
        kept = {id(each.hook) for each in self._live.values()}
        return {id(each.hook): each for each in owners if each.hook is not None and id(each.hook) not in kept}

    def _close_made(self, going: _Made) -> None:
        """Close what factories made; may take as long as writing does."""
        done = threading.Event()
        self._closing[done] = threading.get_ident()
        try:
            for owner in going.values():
                error = close_hook(owner.hook)
                if error is not None and owner.counted is not None:
                    owner.counted.policy.count(owner.counted.name, error, "in close")
        finally:
            del self._closing[done]
            done.set()

    def _metrics(self) -> dict[str, dict[str, float]]:
        found = {}
        for id, live in self._live.items():
            if callable(getattr(live.hook, "to_metrics", None)):
                try:
                    found[id] = dict(live.hook.to_metrics())
                except Exception as error:
                    live.counted.policy.count(live.counted.name, error, "in to_metrics")
        return found
