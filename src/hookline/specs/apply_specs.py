"""Attach the hooks that specs describe: call every factory and find every site, then attach all of them or none.

Users call `register_hooks`; `ModelRunner`, served models and the command line use the parts too. They call ``sites``.
The lines that are logged are those of SGLang's model hooks, word for word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline.error_policy import ErrorPolicy
from hookline.errors import HookSignatureError, NoMatchError, OptionError
from hookline.messages import type_name
from hookline.plain import own_copy
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.attention import AttentionPart
from hookline.sites.functions.attach_function import attach_to_functions
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import FUNCTION, Kind
from hookline.sites.parameters import attach_to_parameters, select_parameters
from hookline.sites.signature import changes_in_place, check_hook, check_observe, hook_name, may_return_value
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import clean_modules
from hookline.specs.hook_spec import HookSpec, resolve_callable

if TYPE_CHECKING:
    from hookline.sites.hook_at_site import Attachment

logger = logging.getLogger("hookline.specs.hook_spec")
"""Named after the file that users know."""


class _SkippedError(Exception):
    """Say why a spec is not attached; the message is logged."""


def register_hooks(
    model: nn.Module,
    hook_specs: Iterable[HookSpec | Mapping[str, Any]],
    *,
    strict: bool = False,
    allow: Iterable[str] | None = None,
) -> HandleSet:
    """Attach the hooks that `hook_specs` describe, all of them or, if that fails, none.

    Recipe::

        handles = hookline.register_hooks(
            model,
            [
                {
                    "name": "capture_outer",
                    "target_modules": ["outer.0", "outer.1"],
                    "hook_factory": "my_project.hooks:dummy_hook_factory",
                    "config": {"tag": "outer"},
                }
            ],
        )
        model(x)
        handles.remove()

    A module that several patterns of a spec match, or that has several names, gets its hook once. Patterns are held
    against every name of a module, with and without the prefixes of wrappers (``module.``, ``_orig_mod.``).

    Args:
        model: The model; names are relative to it.
        hook_specs: Objects of `HookSpec`, or dictionaries with the same keys; they are only read.
        strict: Raise where otherwise a line is logged and the spec passed over: no ``target_modules``, no
            ``hook_factory``, a factory that returns None, a pattern that matches nothing.
        allow: What paths of factories may begin with, see `resolve_callable`; None allows all.

    Returns:
        A handle for each spec that was attached, in their order.

    Raises:
        ValueError, AttributeError, ImportError: A path that names nothing; see `resolve_callable`.
        Exception: Whatever a factory raises. A note on the exception says which spec it was.
    """
    if isinstance(hook_specs, str | Mapping | HookSpec) or not isinstance(hook_specs, Iterable):
        raise OptionError(f"Hook specs come in a list, got {type(hook_specs).__name__}; write [spec].")
    check_model(model)
    allowed = None if allow is None else [allow] if isinstance(allow, str) else list(allow)
    valid = [_validate(index, spec) for index, spec in enumerate(hook_specs)]
    made: list[Any] = []
    try:
        handles = _attach_all(_prepare_all(model, valid, strict, allowed, made))
    except BaseException:
        close_hooks(made)
        raise
    used = {id(hook) for hook in hooks_of(handles)}
    close_hooks(hook for hook in made if id(hook) not in used)
    return handles


def _validate(index: int, spec: HookSpec | Mapping[str, Any]) -> HookSpec:
    with _noting_spec(index, str(spec.get("name") or "") if isinstance(spec, Mapping) else ""):
        return spec if isinstance(spec, HookSpec) else HookSpec.from_dict(spec)


@contextmanager
def _noting_spec(index: int, name: str) -> Iterator[None]:
    """Add a note to an error in the block: which spec it is about. Its message stays as it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This is about hook spec {index}{f' ({name!r})' if name else ''}.")
        raise


class _Prepared(NamedTuple):
    """A spec whose hook is made and whose sites are found."""

    position: int
    spec: HookSpec
    attachment: Attachment
    sites: SpecSites


def _prepare_all(
    model: nn.Module, specs: list[HookSpec], strict: bool, allow: list[str] | None, made: list[Any]
) -> list[_Prepared]:
    prepared = []
    for index, spec in enumerate(specs):
        with _noting_spec(index, spec.name):
            try:
                if spec.enabled:
                    prepared.append(_Prepared(index, spec, *_prepare(model, spec, strict, allow, made)))
            except _SkippedError as reason:
                if strict:
                    raise OptionError(f"{reason}.") from None
                logger.warning("%s", reason)
    return prepared


def _prepare(
    model: nn.Module, spec: HookSpec, strict: bool, allow: list[str] | None, made: list[Any]
) -> tuple[Attachment, SpecSites]:
    """Return what to attach, and where; add the hook to `made`. As in SGLang, the factory runs if no module matches."""
    path = spec.hook_factory
    if not spec.target_modules:
        raise _SkippedError(f"Hook spec '{spec.name}' has no 'target_modules', skipping")
    if path is None:  # an empty path is one, and is wrong
        raise _SkippedError(f"Hook spec '{spec.name}' has no 'hook_factory', skipping")
    hook = call_factory(path, spec.config, allow, observe=spec.observe)
    if hook is None:
        raise _SkippedError(f"Hook factory '{path}' for spec '{spec.name}' returned None, not registering any hook")
    made.append(hook)
    kind, site_type = spec.kind_and_site_type
    called = _with_options(hook, spec, wants_site=check_hook(hook, kind, site_type=site_type))
    options = AttachOptions(observe=spec.observe, name=spec.name or hook_name(hook))
    attachment = new_attachment(called, kind, options, site_type=site_type)
    attachment.turns = called.calls if isinstance(called, _ScheduledHook) else None
    sites = find_sites(model, spec, strict=strict)
    if sites is None:
        raise _SkippedError(f"No modules matched hook spec '{spec.name}' patterns={list(spec.target_modules)}")
    if isinstance(hook, ErrorHandlingHook):
        hook.check_sites(sites.names)
    return attachment, sites


def _attach_all(prepared: list[_Prepared]) -> HandleSet:
    handles = HandleSet()
    try:
        for each in prepared:
            with _noting_spec(each.position, each.spec.name):
                handles.add(each.sites.attach(each.attachment))
    except BaseException:
        handles.remove(quiet=True)
        raise
    for each, handle in zip(prepared, handles, strict=True):
        assert isinstance(handle, HookHandle)
        for name in handle.names:
            logger.info("Registered %s hook '%s' on %s", each.spec.on, each.attachment.name, name)
    return handles


# -- sites ----------------------------------------------------------------------------------------------------


class SpecSites(NamedTuple):
    """The sites that the patterns of a spec match in a model."""

    names: list[str]
    """Of modules, parameters or functions; each once, in the model's order."""
    attach: Callable[[Attachment], HookHandle]
    """Attaches to all of them."""


_Finder = Callable[[nn.Module, list[str], list[str]], SpecSites]


def find_sites(model: nn.Module, spec: HookSpec, *, strict: bool = False) -> SpecSites | None:
    """Return the sites that the hook of `spec` would go to, without attaching it; None if there are none."""
    kind, site_type = spec.kind_and_site_type
    finder = _functions if site_type is FUNCTION else _parameters if kind is Kind.PARAM_GRAD else _modules
    patterns = list(spec.target_modules)
    if not strict and len(patterns) > 1:  # of several, one is enough
        patterns = [pattern for pattern in patterns if _matches(model, pattern, finder)]
    if not patterns:
        return None
    try:
        return finder(model, patterns, list(spec.exclude or ()))
    except NoMatchError:  # nothing has such a name, or all of it is excluded
        if strict:
            raise
        return None


def _matches(model: nn.Module, pattern: str, finder: _Finder) -> bool:
    try:
        finder(model, [pattern], [])
    except NoMatchError:
        return False
    return True


def _modules(model: nn.Module, patterns: list[str], exclude: list[str]) -> SpecSites:
    """Return the modules that match, each under its first name."""
    found = select(model, patterns, exclude=exclude)
    ids = {id(module) for _, module in found}
    chosen = [named for named in clean_modules(model) if id(named[1]) in ids]
    chosen += [named for named in found if isinstance(named[1], AttentionPart)]
    return SpecSites([name for name, _ in chosen], lambda attachment: attach_to_modules(attachment, model, chosen))


def _parameters(model: nn.Module, patterns: list[str], exclude: list[str]) -> SpecSites:
    chosen = select_parameters(model, patterns, exclude=exclude)
    return SpecSites([each.name for each in chosen], lambda attachment: attach_to_parameters(attachment, model, chosen))


def _functions(model: nn.Module, patterns: list[str], exclude: list[str]) -> SpecSites:
    places = find_places(patterns, exclude=exclude)
    return SpecSites([each.name for each in places], lambda attachment: attach_to_functions(attachment, places, model))


# -- the hook of a spec ---------------------------------------------------------------------------------------


def call_factory(path: Any, config: Mapping[str, Any], allow: Iterable[str] | None, *, observe: bool) -> Any:
    """Return what a factory, or the one at `path`, makes of a copy of `config`; None if that is what it returns.

    With `observe`, a hook that is there to edit is refused: what it returns would be ignored.
    """
    factory = resolve_callable(path, allow) if isinstance(path, str) else path
    if not callable(factory):
        raise HookSignatureError(f"Hook factory '{path}' is called with a config, and is {type_name(factory)}.")
    hook = factory(own_copy(dict(config)))
    if isinstance(hook, Coroutine):
        hook.close()  # otherwise Python warns that it was never awaited
        raise HookSignatureError(f"Hook factory '{path}' is async: it gives no hook, but a promise of one.")
    check_observe(hook, observe)
    return hook


def hooks_of(handles: Iterable[RemovableHandle]) -> list[Any]:
    """Return the hooks of `handles`, as their factories made them."""
    found = [handle._attachment.hook for handle in handles if isinstance(handle, HookHandle)]
    return [hook.hook if isinstance(hook, _ScheduledHook) else hook for hook in found]


def close_hooks(hooks: Iterable[Any]) -> None:
    """Call ``close()`` of each hook that has one, once; log what one raises, and go on with the others."""
    for hook in {id(hook): hook for hook in hooks}.values():
        close_hook(hook)


def close_hook(hook: Any) -> Exception | None:
    """Call ``close()`` of a hook that has one; log and return what it raises."""
    close = getattr(hook, "close", None)
    try:
        if callable(close):
            close()
    except Exception as error:
        logger.exception("Closing hook '%s' raised; what it had not written may be lost", hook_name(hook))
        return error
    return None


class ErrorHandlingHook:
    """Call a hook; under ``on_error`` "warn" and "disable" its exceptions are counted, logged once, and kept inside."""

    def __init__(self, hook: Any, policy: ErrorPolicy, name: str, wants_site: bool) -> None:
        self.hook = hook
        self.name = name
        self.policy = policy
        self.off = False
        """Whether an error has switched it off."""
        self._wants_site = wants_site

    def check_sites(self, names: Sequence[str]) -> None:
        """Raise if the hook cannot be on the sites ``names``; called before it is attached to any of them."""

    def _invoke(self, args: tuple[Any, ...], site: Any) -> Any:
        return self.hook(*args, site=site) if self._wants_site else self.hook(*args)

    def _handle(self, error: Exception, where: str) -> bool:
        """Count the error of a call on the module named ``where``; return whether it stays inside."""
        goes_on = self.policy.handle(self.name, error, f"on {where or 'the model'}")
        self.off = self.name in self.policy.disabled
        return goes_on


class _ScheduledHook(ErrorHandlingHook):
    """Run a hook in every n-th forward of the model (``every``)."""

    def __init__(self, hook: Any, spec: HookSpec, wants_site: bool) -> None:
        super().__init__(hook, ErrorPolicy(spec.on_error, logger), spec.name or hook_name(hook), wants_site)
        self.calls: dict[str, tuple[int, int]] = {}
        """How often it ran at each site, and in which forward last; a receipt shows it."""
        self._every = spec.every or 1

    def _is_due(self, step: int) -> bool:
        # Before any step began (-1) it is due: a gradient of a parameter, where no hook saw the forward that led to it.
        return not self.off and max(step, 0) % self._every == 0

    def _call(self, args: tuple[Any, ...], site: Any) -> Any:
        self.calls[site.name] = self.calls.get(site.name, (0, -1))[0] + 1, site.step
        if self.policy.on_error == "raise":
            return self._invoke(args, site)
        try:
            return self._invoke(args, site)
        except Exception as error:
            self._handle(error, site.name)
            return None


class _ScheduledObserver(_ScheduledHook):
    """Call a hook that returns nothing."""

    def __call__(self, *args: Any, site: Any) -> None:
        if self._is_due(site.step):
            self._call(args, site)


class _ScheduledEdit(_ScheduledHook):
    """Call a hook whose return value counts."""

    def __call__(self, *args: Any, site: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse(self.name, self._every, self.policy.on_error)
        if self._is_due(site.step):
            return self._call(args, site)
        return None


def _with_options(hook: Any, spec: HookSpec, *, wants_site: bool) -> Any:
    """Return `hook` with the ``every`` and ``on_error`` of its spec; the hook itself if the spec has neither."""
    if spec.every is None and spec.on_error == "raise":
        return hook
    edits = may_return_value(hook) or changes_in_place(hook)
    # Two classes, as whether a hook can edit is read off its code, and one that cannot is cheaper to watch with.
    return (_ScheduledEdit if edits and not spec.observe else _ScheduledObserver)(hook, spec, wants_site)


@_torch.constant_while_tracing
def _refuse(name: str, every: int, on_error: str) -> None:
    option = f"every={every}" if every > 1 else f"on_error={on_error!r}"
    raise OptionError(
        f"Hook {name!r} edits, and has {option}: in compiled code an edit is part of the graph, and is made in every "
        f"forward or none. Use observe=True, leave {option.partition('=')[0]} out, or run that module eagerly "
        "(torch.compiler.disable)."
    )
