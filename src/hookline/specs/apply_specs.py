"""From specs to hooks that are on: factories are called and places found for all of them, before the first goes on.

Takes a model and specs from ``register_hooks``, hands attachments to ``sites`` and a `HandleSet` back. The lines it
logs are those of the system that this format comes from, word for word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from hookline.errors import NoMatchError, OptionError
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.functions.attach_function import attach_to_functions
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.kinds import FUNCTION, Kind
from hookline.sites.select import check_model, select, without_scripted
from hookline.sites.signature import check_hook, hook_name
from hookline.sites.tensors.parameter_hooks import attach_to_parameters, select_parameters
from hookline.sites.wrappers import clean_modules
from hookline.specs.hook_spec import HookSpec
from hookline.specs.spec_hooks import close_hooks, hook_made_by, hooks_of, turns_of, with_care

if TYPE_CHECKING:
    from hookline.sites.hook_at_site import Attachment

__all__ = ["Places", "apply_specs", "find_for"]

logger = logging.getLogger("hookline.specs.hook_spec")
"""Named after the file that users know."""


class _Ready(NamedTuple):
    """A spec with all that can go wrong behind it."""

    position: int
    spec: HookSpec
    attachment: Attachment
    fasten: Callable[[Attachment], HookHandle]


class _Skipped(Exception):
    """A spec that nothing comes of; the message is what is logged."""


def apply_specs(
    model: nn.Module, specs: list[HookSpec | Mapping[str, Any]], *, strict: bool, allow: Iterable[str] | None
) -> HandleSet:
    """Attach the hooks that specs describe, all or none; what was made and is not attached is closed."""
    check_model(model)
    allowed = None if allow is None else [allow] if isinstance(allow, str) else list(allow)
    checked = [_checked(index, spec) for index, spec in enumerate(specs)]
    made: list[Any] = []
    try:
        handles = _fasten_all(_prepare_all(model, checked, strict, allowed, made))
    except BaseException:
        close_hooks(made)
        raise
    used = {id(hook) for hook in hooks_of(handles)}
    close_hooks(hook for hook in made if id(hook) not in used)
    return handles


def _prepare_all(
    model: nn.Module, specs: list[HookSpec], strict: bool, allow: list[str] | None, made: list[Any]
) -> list[_Ready]:
    ready = []
    for index, spec in enumerate(specs):
        with _said_of(index, spec.name):
            try:
                if spec.enabled:
                    ready.append(_Ready(index, spec, *_prepare(model, spec, strict, allow, made)))
            except _Skipped as reason:
                if strict:
                    raise OptionError(f"{reason}.") from None
                logger.warning("%s", reason)
    return ready


def _checked(index: int, spec: HookSpec | Mapping[str, Any]) -> HookSpec:
    with _said_of(index, str(spec.get("name") or "") if isinstance(spec, Mapping) else ""):
        return spec if isinstance(spec, HookSpec) else HookSpec.from_dict(spec)


@contextmanager
def _said_of(index: int, name: str) -> Iterator[None]:
    """An error in the block gets a note which spec it is about; its message stays as it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This is about hook spec {index}{f' ({name!r})' if name else ''}.")
        raise


def _fasten_all(ready: list[_Ready]) -> HandleSet:
    handles = HandleSet()
    try:
        for each in ready:
            with _said_of(each.position, each.spec.name):
                handles.add(each.fasten(each.attachment))
    except BaseException:
        handles.remove(quiet=True)
        raise
    for each, handle in zip(ready, handles, strict=True):
        assert isinstance(handle, HookHandle)
        for name in handle.names:
            logger.info("Registered %s hook '%s' on %s", each.spec.on, each.spec.name, name)
    return handles


# -- one spec ------------------------------------------------------------------------------------------------


def _prepare(
    model: nn.Module, spec: HookSpec, strict: bool, allow: list[str] | None, made: list[Any]
) -> tuple[Attachment, Callable[[Attachment], HookHandle]]:
    """What is to be put on, and what puts it there.

    In the order of the source: its factory runs even if nothing matches.
    """
    if not spec.target_modules:
        raise _Skipped(f"Hook spec '{spec.name}' has no 'target_modules', skipping")
    if spec.hook_factory is None:  # an empty path is one, and is wrong
        raise _Skipped(f"Hook spec '{spec.name}' has no 'hook_factory', skipping")
    hook = _made(spec, allow)
    made.append(hook)
    kind, subject = spec.kind
    wants_site = check_hook(hook, kind, site_type=subject)
    careful = with_care(hook, spec, wants_site=wants_site)
    attachment = new_attachment(
        careful,
        kind,
        observe=spec.observe,
        sees=spec.sees or "edited",
        name=spec.name or hook_name(hook),
        site_type=subject,
    )
    attachment.turns = turns_of(careful)
    found = find_for(model, spec, strict=strict)
    if found is None:
        raise _Skipped(f"No modules matched hook spec '{spec.name}' patterns={list(spec.target_modules)}")
    return attachment, found.fasten


def _made(spec: HookSpec, allow: list[str] | None) -> Any:
    path = spec.hook_factory
    hook = hook_made_by(path, spec.config, allow)
    if hook is None:
        raise _Skipped(f"Hook factory '{path}' for spec '{spec.name}' returned None, not registering any hook")
    return hook


# -- where it goes -------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """What the patterns of a spec mean in a model."""

    names: list[str]
    """Of modules, parameters or functions; each once, in the model's order."""
    fasten: Callable[[Attachment], HookHandle]
    """Puts an attachment on all of them."""


def find_for(model: nn.Module, spec: HookSpec, *, strict: bool = False) -> Places | None:
    """Where the hook of a spec would go, without putting it there; None if that is nowhere."""
    kind, subject = spec.kind
    finder = _functions if subject is FUNCTION else _parameters if kind is Kind.PARAM_GRAD else _modules
    patterns = list(spec.target_modules)
    if not strict and len(patterns) > 1:  # of several, one is enough
        patterns = [pattern for pattern in patterns if _means_something(model, pattern, finder)]
    if not patterns:
        return None
    try:
        return finder(model, patterns, list(spec.exclude or ()))
    except NoMatchError:  # nothing is called so, or all of it is excluded
        if strict:
            raise
        return None


_Finder = Callable[[nn.Module, list[str], list[str]], Places]


def _means_something(model: nn.Module, pattern: str, finder: _Finder) -> bool:
    try:
        finder(model, [pattern], [])
    except NoMatchError:
        return False
    return True


def _modules(model: nn.Module, patterns: list[str], exclude: list[str]) -> Places:
    """Modules, each under its first name."""
    ids = {id(module) for _, module in select(model, patterns, exclude=exclude)}
    chosen = [named for named in clean_modules(model) if id(named[1]) in ids]
    return Places(
        [name for name, _ in chosen],
        lambda attachment: attach_to_modules(attachment, model, without_scripted(chosen, patterns)),
    )


def _parameters(model: nn.Module, patterns: list[str], exclude: list[str]) -> Places:
    chosen = select_parameters(model, patterns, exclude=exclude)
    return Places([each.name for each in chosen], lambda attachment: attach_to_parameters(attachment, model, chosen))


def _functions(model: nn.Module, patterns: list[str], exclude: list[str]) -> Places:
    places = find_places(patterns, exclude=exclude)
    return Places([each.name for each in places], lambda attachment: attach_to_functions(attachment, places, model))
