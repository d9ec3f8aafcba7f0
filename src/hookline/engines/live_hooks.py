"""Keep the hooks on the model that an engine runs: attach and remove them between two forwards, count what they do.

`Session` has one `LiveHooks`, and one `RequestHooks` that attaches to it. A `LiveHook` is the engine's own, or belongs
to a request: then it is prepared when the request asks for it, is on from its first forward to its last, is shown the
rows of that request alone, and what it returns replaces these rows. Both live the same life: made, attached, called,
removed, closed. A spec is attached wholly or not at all, and a hook that raises is switched off while requests go on.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from torch import Tensor

from hookline.engines.request_options import ClientHook, remembered
from hookline.error_policy import ErrorPolicy
from hookline.errors import EngineBusy, EngineClosed, HooklineError, HookNameError, NotAllowedError, OptionError
from hookline.factories import FILE_OPTIONS
from hookline.factories.factory_hook import FactoryHook
from hookline.messages import type_name
from hookline.observe.tokens import Tokens, current_tokens, serving
from hookline.plain import to_plain
from hookline.sites.hook_at_site import PerSiteHook
from hookline.sites.receipt import likely_cause
from hookline.sites.signature import changes_in_place, check_hook, hook_name, may_return_value
from hookline.specs.apply_specs import ErrorHandlingHook, call_factory, close_hook, find_sites, hooks_of, register_hooks
from hookline.specs.hook_spec import HookSpec
from hookline.tree import leaves, map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.handle import HookHandle

logger = logging.getLogger("hookline.serve.hooks")

T = TypeVar("T")
Place = tuple[str, str]
"""The name of a module, and the kind of hook that is on it."""
_Specs = Sequence[HookSpec | Mapping[str, Any]]

MOST_PLACES: Final = 4096
"""Hooks times modules, over the answers of all requests that wait or run. Attaching, calling and removing a hook takes
a part of a millisecond for each, in which no other request gets a token."""
_READY: Final = "hookline.factories"
_MOST_NUMBERS: Final = 16
_FIRST: Final = 4


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

    def __init__(self, spec: HookSpec, hook: Any, widths: Mapping[str, int], owner: RequestRows | None = None) -> None:
        kind, site_type = spec.kind_and_site_type
        wants_site = check_hook(hook, kind, site_type=site_type)
        name = spec.name or (hook.name if isinstance(hook, FactoryHook) else hook_name(hook))
        super().__init__(hook, ErrorPolicy(spec.on_error, logger), name, wants_site)
        self.__qualname__ = name  # reports call it by this
        self.spec = spec
        """As it was given, but for ``on_error``."""
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
                    f"{self.hook.name} was given {width} numbers, and the output of {name or 'the model'} "
                    f"has {found} for each token: give {found}, or name modules whose output has {width}."
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
        return zip(self.matched, repeat(self.spec.kind_and_site_type[0].value))

    @property
    def errors(self) -> int:
        """Return how often it raised."""
        return self.policy.counts[self.name]

    @property
    def last_error(self) -> str | None:
        """Return the last exception, with its place."""
        return self.policy.last.get(self.name)

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
            "fired": self.fired,
            "last_step": self.handle.report().last_step,
            "cost_us": self._seconds / self.fired * 1e6 if self.fired else None,  # of one call, on the host
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


def at_once(act: Callable[[], T], done: Future[T] | None = None) -> Future[T]:
    """Run ``act`` at once, unless ``done`` was cancelled: for an engine that takes calls between its steps only."""
    done = done or Future()
    if done.set_running_or_notify_cancel():
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
        patience_s: float | None = None,
    ) -> LiveHook:
        """Attach one hook, wholly or not at all.

        Args:
            spec: A dictionary, in which ``on_error`` is ``"disable"`` unless it says otherwise; or a `HookSpec`,
                which is taken at its word.
            allow: What paths of factories may begin with; None: what the engine allows.
            strict: Every pattern has to match; with False, one of them.
            patience_s: How long to wait for the running forward; None waits to its end.

        Raises:
            NotAllowedError, NoMatchError, OptionError, ValueError, AttributeError, ImportError: As `register_hooks`.
            EngineBusy: The forward took longer than ``patience_s``; nothing is attached, now or later.
            OptionError: Its vector or head is not as long as the output of a module, where the engine knows that.
            Exception: Whatever the factory raises.
        """
        added = self.add_all([spec], allow=allow, strict=strict, patience_s=patience_s)
        if not added:
            raise OptionError("Nothing was attached: the spec is not enabled, or nothing matches (see the log).")
        return added[0]

    def add_all(
        self,
        specs: _Specs,
        *,
        allow: Iterable[str] | None = None,
        strict: bool = False,
        patience_s: float | None = None,
    ) -> _Hooks:
        """Attach several hooks, all or none; without ``strict``, log and skip those that match nothing.

        Each spec uses up a number, attached or not: the workers of one engine have the same ids for the same hooks.
        """
        allow = self._allow if allow is None else allow
        allowed = None if allow is None else (allow,) if isinstance(allow, str) else tuple(allow)
        return _in_time(self._between(lambda: self._add(specs, allowed, strict)), patience_s)

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
        """Return the metrics of each hook by its id."""
        return self._between(lambda: {live.id: live.metrics() for live in self.list()}).result()

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

    def _add(self, specs: _Specs, allow: tuple[str, ...] | None, strict: bool) -> _Hooks:
        first, self._numbered = self._numbered + 1, self._numbered + len(specs)
        checked = [self._checked(spec) for spec in specs]
        factories = [_Factory(spec, f"h{number}", allow, self.widths) for number, spec in enumerate(checked, first)]
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


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON takes them: it has no NaN and no infinity."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


# -- hooks of single requests -------------------------------------------------------------------------------------


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
            live = LiveHook.of(spec, hook, self._live.widths, RequestRows(id, self._inputs))
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
        self._live.attach([(live.spec, lambda config, live=live: live) for live in self.hooks])
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
    given = dict(leaves(edited))

    def put(path: str, tensor: Tensor) -> Tensor:
        own, new = rows.cut(tensor), given.get(path)
        if own is None:
            return tensor
        if not isinstance(new, Tensor) or new.shape != own.shape:
            found = tuple(new.shape) if isinstance(new, Tensor) else type_name(new)
            raise OptionError(f"A hook of a request returned {found} in place of rows of shape {tuple(own.shape)}.")
        changed = tensor.clone()
        place = rows.cut(changed)
        assert place is not None
        place.copy_(new)
        return changed

    return map_tensors(value, put)
