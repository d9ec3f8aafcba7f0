"""Keep the hooks on the model that an engine runs: attach and remove them between two forwards, count what they do.

`Session` has one `LiveHooks`. A `LiveHook` is the engine's own, or belongs to a request (`OwnRows`), and then sees the
rows of that request alone; both live the same life: made, attached, called, removed, closed. A spec is attached wholly
or not at all, and a hook that raises is switched off while requests go on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from hookline.error_policy import ErrorPolicy
from hookline.errors import EngineBusy, EngineClosed, HookNameError, OptionError
from hookline.factories.factory_hook import FactoryHook
from hookline.plain import to_plain
from hookline.sites.hook_at_site import PerSiteHook
from hookline.sites.receipt import likely_cause
from hookline.sites.signature import changes_in_place, check_hook, hook_name, may_return_value
from hookline.specs.apply_specs import ErrorHandlingHook, call_factory, close_hook, hooks_of, register_hooks
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.handle import HookHandle

__all__ = ["Between", "LiveHook", "LiveHooks", "Origin", "OwnRows", "Place", "at_once", "finite_metrics"]

logger = logging.getLogger("hookline.serve.hooks")

T = TypeVar("T")
Origin = Literal["start", "http"]
Place = tuple[str, str]
"""The name of a module, and the kind of hook that is on it."""
_Specs = Sequence[HookSpec | Mapping[str, Any]]

_MOST_NUMBERS: Final = 16
_FIRST: Final = 4


class OwnRows(Protocol):
    """The rows of the request that a hook belongs to."""

    def run(self, hook: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...], name: str, *, edits: bool) -> Any:
        """Call ``hook`` with the rows alone; return the output with the rows as it has edited them, None without."""


class LiveHook(ErrorHandlingHook):
    """A hook on a served model, and what it has done.

    Recipe::

        for hook in engine.hooks.list():
            print(hook.id, hook.matched, hook.fired, hook.last_error)

    Its figures are those of the moment they are read, also after it was removed.
    """

    id = ""
    """``"h1"``, ``"h2"``, …; never used again. Those of requests have none."""
    handle: HookHandle

    def __init__(
        self,
        spec: HookSpec,
        hook: Any,
        widths: Mapping[str, int],
        origin: Origin = "http",
        owner: OwnRows | None = None,
    ) -> None:
        kind, site_type = spec.kind_and_site_type
        wants_site = check_hook(hook, kind, site_type=site_type)
        name = spec.name or (hook.name if isinstance(hook, FactoryHook) else hook_name(hook))
        super().__init__(hook, ErrorPolicy(spec.on_error, logger), name, wants_site)
        self.__qualname__ = name  # reports call it by this
        self.spec = spec
        """As it was given, but for ``on_error``."""
        self.origin = origin
        """Whether it came with the start or later, over HTTP."""
        self.owner = owner
        """The request that it belongs to; None for a hook of the engine."""
        self.fired = 0
        """How often it was called, on all its modules together."""
        self._seconds = 0.0
        self._widths = widths

    @classmethod
    def of(cls, spec: HookSpec, hook: Any, *rest: Any) -> LiveHook:
        """Return a live hook that edits, or one that observes: which it is, is read off the code of its class."""
        edits = not spec.observe and (may_return_value(hook) or changes_in_place(hook))
        return (cls if edits else _LiveObserver)(spec, hook, *rest)

    def check_sites(self, names: Sequence[str]) -> None:
        """Raise if the hook is made for outputs of another width than that of a module in ``names``."""
        width = self.hook.width if isinstance(self.hook, FactoryHook) else None
        for name in names if width is not None else ():
            found = self._widths.get(name, width)
            if found != width:
                raise OptionError(
                    f"{self.hook.name} was given what is for {width} numbers, and the output of {name or 'the model'} "
                    f"has {found} for each token: give it one of {found}, or name modules whose output has {width}."
                )

    def __call__(self, *args: Any, site: Any) -> Any:
        """Return what the hook does, as an edit."""
        return self.run(self._invoke, (args, site), site.name)

    def _invoke(self, args: tuple[Any, ...], site: Any) -> Any:
        call = partial(super()._invoke, site=site)
        if self.owner is None:
            return call(args)
        return self.owner.run(call, args, site.name, edits=not isinstance(self, _LiveObserver))

    def run(self, act: Callable[..., Any], args: tuple[Any, ...], where: str) -> Any:
        """Return what ``act`` of the hook does with ``args``, at the module ``where``; None if it raises."""
        if self.off:
            return None
        self.fired += 1
        start = time.perf_counter()
        try:
            return act(*args)
        except Exception as error:
            if not self._handle(error, where):
                raise
            return None
        finally:
            self._seconds += time.perf_counter() - start

    @property
    def matched(self) -> tuple[str, ...]:
        """Return the names of the modules that it is on."""
        return self.handle.names

    @property
    def places(self) -> Iterator[Place]:
        """Yield the modules that it is on, with the kind of hook."""
        return ((name, self.spec.kind_and_site_type[0].value) for name in self.matched)

    @property
    def last_step(self) -> int | None:
        """Return the forward of the model in which it was last due; None if it never was."""
        return self.handle.report().last_step

    @property
    def cost_us(self) -> float | None:
        """Return the microseconds of one call on the host; None before the first."""
        return self._seconds / self.fired * 1e6 if self.fired else None

    @property
    def errors(self) -> int:
        """Return how often it raised."""
        return self.policy.counts[self.name]

    @property
    def last_error(self) -> str | None:
        """Return the last exception, with its place."""
        return self.policy.last.get(self.name)

    @property
    def removed(self) -> bool:
        """Return whether it has been removed."""
        return self.handle.removed

    def metrics(self) -> dict[str, float]:
        """Return what the hook itself measures; an error of it is counted."""
        found = getattr(self.hook, "to_metrics", None)
        try:
            return dict(found()) if callable(found) else {}
        except Exception as error:
            self.policy.count(self.name, error, "in to_metrics")
            return {}

    def silent_sites(self) -> dict[str, str]:
        """Return the modules where it has not fired although the model ran, each with the likely cause."""
        attachment = self.handle._attachment
        entries = [each for each in attachment.members() if not each.fired and each.counter.step > each.step_at_attach]
        return {each.name: likely_cause(each, attachment) for each in entries}

    def to_plain(self) -> dict[str, Any]:
        """Return it as ``GET /hooks`` shows it, on every engine."""
        spec, factory = self.spec, self.spec.hook_factory
        is_path = factory is None or isinstance(factory, str)
        return {
            "id": self.id,
            "name": self.name,
            "hook_factory": factory or "" if is_path else f"{factory.__module__}:{hook_name(factory)}",
            "target_modules": list(spec.target_modules),
            **{key: getattr(spec, key) for key in ("on", "observe", "every", "on_error")},
            "config": _shortened(to_plain(spec.config)),
            "matched": list(self.matched),
            **{key: getattr(self, key) for key in ("origin", "fired", "last_step", "cost_us")},
            **{key: getattr(self, key) for key in ("errors", "off", "last_error")},
        }


class _LiveObserver(LiveHook, PerSiteHook):
    """Call a hook that returns nothing; one that has a function for each module by these."""

    def __call__(self, *args: Any, site: Any) -> None:
        self.run(self._invoke, (args, site), site.name)

    @property
    def is_per_site(self) -> bool:
        return self.owner is None and isinstance(self.hook, PerSiteHook) and self.hook.is_per_site

    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what observes the module called ``name``."""
        observe = self.hook.for_site(name)
        return lambda module, args, output: self.run(observe, (module, args, output), name)


def _shortened(value: Any) -> Any:
    """Return a plain value with long lists of numbers by their first ones: the vector of `steer` has thousands."""
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > _MOST_NUMBERS and all(isinstance(each, int | float) for each in value):
        return [*value[:_FIRST], f"… {len(value) - _FIRST} more"]
    return [_shortened(each) for each in value]


class _Factory:
    """The factory of a spec, whose hook becomes a `LiveHook`."""

    def __init__(self, spec: HookSpec, id: str, allow: tuple[str, ...] | None, *rest: Any) -> None:
        self.spec = spec
        self._id = id
        self._allow = allow
        self._rest = rest
        self.hook: Any = None
        """What it made."""
        self.live: LiveHook | None = None

    def __call__(self, config: dict[str, Any]) -> LiveHook | None:
        hook = self.hook = call_factory(self.spec.hook_factory, config, self._allow, observe=self.spec.observe)
        if hook is None:
            return None
        self.live = LiveHook.of(self.spec, hook, *self._rest)
        self.live.id = self._id
        return self.live

    def __str__(self) -> str:  # in messages
        return str(self.spec.hook_factory)


def _spec_with(spec: HookSpec, **changes: Any) -> HookSpec:
    """Return a spec, that of a client too, as a `HookSpec` with other values."""
    return HookSpec(**{**{each.name: getattr(spec, each.name) for each in fields(HookSpec)}, **changes})


class Between(Protocol):
    """Runs an act when no forward is running: `Engine.between`, `at_once`."""

    def __call__(self, act: Callable[[], T]) -> Future[T]: ...


def at_once(act: Callable[[], T]) -> Future[T]:
    """Run ``act`` at once, for an engine that takes calls between its steps only."""
    done: Future[T] = Future()
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)
    return done


def _in_time(done: Future[T], patience_s: float | None) -> T:
    """Return the result of an act between two forwards; take back one whose turn has not come in time."""
    try:
        return done.result(patience_s)
    except TimeoutError:
        if done.cancel():
            raise EngineBusy(f"The engine had no time for this within {patience_s:g} s; try again.") from None
        return done.result()  # it is being done, or the error is its own


_Hooks = list[LiveHook]  # `LiveHooks` has a method of that name


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
        between: Between = at_once,
        *,
        allow: Iterable[str] | None = None,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        self.on: _Hooks = []
        """All that are attached, those of requests too; oldest first. A new list for each change: any thread reads."""
        self._model = model
        self.widths = widths or {}
        """How many numbers the output of a module has for a token, where that is known."""
        self._between = between
        self._allow = allow
        self._numbered = 0
        self._is_closed = False
        self._lock = threading.RLock()
        """Held while hooks come and go: once the engine is over, any thread may do it at once."""

    @property
    def is_active(self) -> bool:
        """Return whether a hook is on that no error has switched off."""
        return any(not live.off for live in self.on)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Switch all hooks off for the block, whose forwards are no requests'."""
        on = [live for live in self.on if not live.off]
        for live in on:
            live.off = True
        try:
            yield
        finally:
            for live in on:
                live.off = False

    def add(
        self,
        spec: HookSpec | Mapping[str, Any],
        *,
        allow: Iterable[str] | None = None,
        strict: bool = True,
        origin: Origin = "http",
        patience_s: float | None = None,
    ) -> LiveHook:
        """Attach one hook, wholly or not at all.

        Args:
            spec: A dictionary, in which ``on_error`` is ``"disable"`` unless it says otherwise; or a `HookSpec`,
                which is taken at its word.
            allow: What paths of factories may begin with; None: what the engine allows.
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
        allow: Iterable[str] | None = None,
        strict: bool = False,
        origin: Origin = "start",
        patience_s: float | None = None,
    ) -> _Hooks:
        """Attach several hooks, all or none; without ``strict``, log and skip those that match nothing.

        Each spec uses up a number, attached or not: the workers of one engine have the same ids for the same hooks.
        """
        allow = self._allow if allow is None else allow
        allowed = None if allow is None else (allow,) if isinstance(allow, str) else tuple(allow)
        return _in_time(self._between(lambda: self._add(specs, allowed, strict, origin)), patience_s)

    def remove(self, id: str, *, patience_s: float | None = None) -> LiveHook:
        """Remove one hook, and close what its factory made, unless another hook has the same.

        Raises:
            HookNameError: There is none of that id, or it is off already.
        """
        live = _in_time(self._between(lambda: self._remove(id)), patience_s)
        self._close_made([(live.hook, live)])  # on this thread: the caller waits until all is written, forwards do not
        return live

    def list(self) -> _Hooks:
        """Return the attached hooks of the engine, oldest first."""
        return [live for live in self.on if live.owner is None]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id; hooks without ``to_metrics`` are left out."""
        return self._between(self._metrics).result()

    def close(self) -> None:
        """Remove all hooks for good, the last first, and flush them."""
        with self._lock:
            self._is_closed = True
        while self.on:
            with self._lock:  # another thread may be removing the same one
                gone = [self._take_off(live) for live in self.on[-1:]]
            self._close_made([(live.hook, live) for live in gone])

    # -- between two forwards --------------------------------------------------------------------------------

    def attach(self, makers: Sequence[tuple[HookSpec, Any]], *, strict: bool = True) -> _Hooks:
        """Attach live hooks, all or none: of each its spec, and the function of a config that returns it."""
        # They deal with their errors themselves.
        specs = [_spec_with(spec, hook_factory=make, on_error="raise") for spec, make in makers]
        with self._lock:
            if self._is_closed:
                raise EngineClosed("The engine is closed, and takes no more hooks.")
            handles = register_hooks(self._model, specs, strict=strict)
            added: _Hooks = hooks_of(handles)
            live: LiveHook
            handle: Any  # a `HookHandle` each
            for live, handle in zip(added, handles, strict=True):
                live.handle = handle
                if isinstance(live.hook, FactoryHook):
                    live.hook.expect(handle.names)
            self.on = [*self.on, *added]
            return added

    def detach(self, hooks: Sequence[LiveHook]) -> None:
        """Remove hooks that are on, and close all of them; one that never was on has been made all the same."""
        with self._lock:
            for live in hooks:
                if live in self.on:
                    self._take_off(live)
        self._close_made([(live.hook, live) for live in hooks])

    def _add(self, specs: _Specs, allow: tuple[str, ...] | None, strict: bool, origin: Origin) -> _Hooks:
        first, self._numbered = self._numbered + 1, self._numbered + len(specs)
        checked = [self._checked(spec) for spec in specs]
        factories = [
            _Factory(spec, f"h{number}", allow, self.widths, origin) for number, spec in enumerate(checked, first)
        ]
        try:
            return self.attach(
                [(each.spec, None if each.spec.hook_factory is None else each) for each in factories], strict=strict
            )
        finally:  # of what was made and is not on, also if that is all of it
            self._close_made([(each.hook, each.live) for each in factories if each.hook is not None])

    @staticmethod
    def _checked(spec: HookSpec | Mapping[str, Any]) -> HookSpec:
        if isinstance(spec, HookSpec):
            return spec
        is_said = not isinstance(spec, Mapping) or spec.get("on_error") is not None
        return HookSpec.from_dict(spec if is_said else {**spec, "on_error": "disable"})

    def _remove(self, id: str) -> LiveHook:
        with self._lock:
            hooks = self.list()
            live = next((live for live in hooks if live.id == id), None)
            if live is None:
                known = ", ".join(f"{each.id!r} ({each.name})" for each in hooks)
                raise HookNameError(f"No hook has the id {id!r}; there is {known or 'none'}.")
            return self._take_off(live)

    def _take_off(self, live: LiveHook) -> LiveHook:
        self.on = [each for each in self.on if each is not live]
        live.handle.remove(quiet=True)
        return live

    def _close_made(self, going: Sequence[tuple[Any, LiveHook | None]]) -> None:
        """Close what factories made, each once, unless a hook that stays on has it; may take as long as writing."""
        with self._lock:
            kept = {id(live.hook) for live in self.on}
        for hook, live in {id(hook): (hook, live) for hook, live in going if id(hook) not in kept}.values():
            error = close_hook(hook)
            if error is not None and live is not None:
                live.policy.count(live.name, error, "in close")

    def _metrics(self) -> dict[str, dict[str, float]]:
        with_metrics = (live for live in self.list() if callable(getattr(live.hook, "to_metrics", None)))
        return {live.id: live.metrics() for live in with_metrics}


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON takes them: it has no NaN and no infinity."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
