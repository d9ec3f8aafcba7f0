"""Count the calls, seconds and errors of a hook on a served model.

`LiveHooks` gives each spec a `CountingFactory`, which makes a `CountedHook` around what the spec's own factory makes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.error_policy import ErrorPolicy
from hookline.errors import OptionError
from hookline.factories.factory_hook import FactoryHook
from hookline.sites.compiled.op_schemas import Handed, Summary
from hookline.sites.hook_at_site import PerSiteHook
from hookline.sites.signature import changes_in_place, check_hook, hook_name, may_return_value
from hookline.specs.apply_specs import ErrorHandlingHook, call_factory

if TYPE_CHECKING:
    from torch import nn

    from hookline.specs.hook_spec import HookSpec

__all__ = ["CountedHook", "CountingFactory", "check_width", "finite_metrics"]

logger = logging.getLogger("hookline.serve.hooks")

_CONSEQUENCES: Final = {
    "raise": "fails the requests of that batch; further errors are not logged",
    "warn": "stays on; further errors are not logged",
    "disable": "is switched off",
}


class CountedHook(ErrorHandlingHook):
    """A hook with what is known of it: calls, seconds, errors."""

    widths: Mapping[str, int] = MappingProxyType({})
    """How many numbers the output of a module has for a token, where that is known."""

    def __init__(self, hook: Any, *, name: str, on_error: str, wants_site: bool) -> None:
        super().__init__(hook, ErrorPolicy(on_error, logger, _CONSEQUENCES), name, wants_site)
        self.__qualname__ = name  # reports call it by this
        self.calls = 0
        """How often it was called."""
        self.seconds = 0.0
        """How long it took, on the host."""
        self.in_graph = False
        """Whether it may be part of compiled code, where only its receipt counts."""

    def check_sites(self, names: Sequence[str]) -> None:
        """Raise if the hook is made for outputs of another width than that of a module in ``names``."""
        check_width(self.hook, names, self.widths)

    @property
    def errors(self) -> int:
        """Return how often it raised."""
        return self.policy.counts[self.name]

    @property
    def last_error(self) -> str | None:
        """Return the last error, with its place; None before the first."""
        return self.policy.last.get(self.name)

    def count(self, calls: int, act: Callable[..., object], args: tuple[Any, ...], where: str) -> None:
        """Call ``act`` with ``args``, which stands for so many ``calls`` of the hook on the module ``where``."""
        if self.off:
            return
        self.calls += calls
        start = time.perf_counter()
        try:
            act(*args)
        except Exception as error:
            if not self._handle(error, where):
                raise
        finally:
            self.seconds += time.perf_counter() - start


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON takes them: it has no NaN and no infinity."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def check_width(hook: Any, names: Sequence[str], widths: Mapping[str, int]) -> None:
    """Raise if ``hook`` is made for outputs of another width than that of a module in ``names``, where it is known."""
    width = hook.width if isinstance(hook, FactoryHook) else None
    for name in names if width is not None else ():
        found = widths.get(name, width)
        if found != width:
            raise OptionError(
                f"{hook.name} was given what is for {width} numbers, and the output of {name or 'the model'} has "
                f"{found} for each token: give it one of {found}, or name modules whose output has {width}."
            )


class _CountedObserver(CountedHook):
    """Call a hook that returns nothing."""

    def __call__(self, *args: Any, site: Any) -> None:
        self.count(1, self._invoke, (args, site), site.name)


class _CountedPerSite(_CountedObserver, PerSiteHook):
    """Call an observer that has a function for each module; compiled code hands it the outputs of all at once."""

    def __init__(self, hook: Any, *, name: str, on_error: str, wants_site: bool) -> None:
        super().__init__(hook, name=name, on_error=on_error, wants_site=wants_site)
        if hook.summary is not None:
            self.summary = _CountedSummary(self, hook.summary)

    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what observes the module called ``name``."""
        observe = self.hook.for_site(name)
        return lambda module, args, output: self.count(1, observe, (module, args, output), name)


class _CountedSummary(Summary):
    """Receive in compiled code what an observer receives, and count it."""

    def __init__(self, counted: CountedHook, summary: Summary) -> None:
        self.number, self.make = summary.number, summary.make
        self._counted = counted
        self._receive = summary.receive

    def receive(self, items: Sequence[Handed]) -> None:
        """Take the outputs of modules, each of which is a call."""
        where = items[0].name if len(items) == 1 else f"one of {len(items)} modules, {items[0].name} the first"
        self._counted.count(len(items), self._receive, (items,), where)


class _CountedEdit(CountedHook):
    """Call a hook whose return value counts."""

    def __call__(self, *args: Any, site: Any) -> Any:
        if self.off:
            return None
        if torch.compiler.is_compiling():  # the edit becomes part of the graph, where there is nothing to count
            return self._invoke(args, site)
        return self._call(args, site)

    def _call(self, args: tuple[Any, ...], site: Any) -> Any:
        self.calls += 1
        start = time.perf_counter()
        try:
            return self._invoke(args, site)
        except Exception as error:
            if not self._handle(error, site.name):
                raise
            return None
        finally:
            self.seconds += time.perf_counter() - start


class CountingFactory:
    """Wrap the factory of a spec, and keep what it makes."""

    def __init__(
        self,
        spec: HookSpec,
        allow: tuple[str, ...] | None,
        *,
        compiled: bool = False,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        self.spec = spec
        self._widths = widths or {}
        self._compiled = compiled
        self.hook: Any = None
        self.counted: CountedHook | None = None
        self._allow = allow

    def __call__(self, config: dict[str, Any]) -> CountedHook | None:
        spec = self.spec
        self.hook = call_factory(spec.hook_factory, config, self._allow, observe=spec.observe)
        if self.hook is None:
            return None
        kind, site_type = spec.kind_and_site_type
        wants_site = check_hook(self.hook, kind, site_type=site_type)
        own = self.hook.name if isinstance(self.hook, FactoryHook) else hook_name(self.hook)
        name = spec.name or own
        # Whether a hook can edit is read off its code, hence a class for each.
        edits = not spec.observe and (may_return_value(self.hook) or changes_in_place(self.hook))
        counted: type[CountedHook] = _CountedEdit if edits else _CountedObserver
        if not edits and isinstance(self.hook, PerSiteHook) and self.hook.is_per_site:
            counted = _CountedPerSite
        self.counted = counted(self.hook, name=name, on_error=spec.on_error, wants_site=wants_site)
        self.counted.widths = self._widths
        self._check_compiled(self.counted)
        return self.counted

    def _check_compiled(self, counted: CountedHook) -> None:
        counted.in_graph = self._compiled and isinstance(counted, _CountedEdit)
        if counted.in_graph and (self.spec.every or 1) > 1:  # else every request would fail
            raise OptionError(
                f"Hook {counted.name!r} edits, and has every={self.spec.every}: in compiled code an edit is made in "
                "every forward or none. Leave every out, or use observe=True."
            )

    def __str__(self) -> str:  # in messages
        return str(self.spec.hook_factory)
