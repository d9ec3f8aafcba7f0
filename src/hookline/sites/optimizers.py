"""Attach hooks to an optimizer: around its step, and on saving and loading its state; look through its wrappers.

Users call `attach_optimizer`; so do ``watch.hooks``, and in ``debug.first_bad`` ``step_alarm`` and
``find_bad_operations``. ``everywhere`` puts a hook on every optimizer by `hook_optimizers_everywhere`; ``find`` lists
hooks by `optimizer_entries`. `_OptimizerHooks` keeps the hooks of ours on one optimizer. For each kind that is needed
it registers one `_TorchHook` with torch, which runs our hooks of that kind in our order. ``step_pre`` comes with any
other kind (unless torch is calling hooks of that kind just then), since it counts the steps.

The values of `Kind` are parts of torch's names here (``register_step_pre_hook``, ``_torch.optimizer_hooks``), so a new
kind has to be called as torch calls it. If its hooks may return something, `_edited` has to know the kind. The head of
``kinds`` has the rest of that list.

Accelerate, Lightning, DeepSpeed and others keep torch's optimizer in an attribute of theirs, and some of these wrappers
are subclasses of ``torch.optim.Optimizer`` that were never set up as one. `unwrap_optimizer` finds the optimizer that
makes the steps; ``find``, ``guard``, ``integrations`` and ``debug.first_bad`` call it. `checked_optimizer` also raises
if that takes no hooks; `attach_optimizer`, ``watch.hooks``, ``step_alarm``, ``debug.compare.trace`` and
``integrations.follow`` call it. A wrapper with another attribute needs its name in `_INNER`, and a line in ``WRAPPERS``
of tests/sites/test_optimizer_wrappers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hookline.errors import HookReturnError, UnhookableError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.handle import HookHandle, attaching
from hookline.sites.hook_at_site import NO_MODEL, AttachOptions, HookAtSite, HookContainer, OptimizerSite
from hookline.sites.kinds import OPTIMIZER, Kind
from hookline.sites.module_hooks import Inert

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import Attachment

_INNER: Final = ("optimizer", "_optimizer", "optim", "_optim", "base_optimizer", "inner_optimizer", "wrapped_optimizer")
"""Attributes that wrappers keep the inner optimizer in; the first that holds one is taken."""
_DEEPEST: Final = 8
"""More wrappers than that around one optimizer can only be a ring: then none is taken off."""
_STEP_KINDS: Final = (Kind.STEP_PRE, Kind.STEP_POST)
_STATES_TO_REPLACE: Final = (Kind.STATE_DICT_POST, Kind.LOAD_STATE_DICT_PRE)
"""The kinds whose hooks may return another state dict."""


def attach_optimizer(
    optimizer: Optimizer,
    hook: Hook,
    *,
    on: str | Kind = Kind.STEP_POST,
    prepend: bool = False,
    observe: bool = False,
    name: str | None = None,
) -> HookHandle:
    """Put a hook on an optimizer.

    Recipe::

        def hook(optimizer, args, kwargs, *, site):
            print(site.step, optimizer.param_groups[0]["lr"])


        with hookline.attach_optimizer(optimizer, hook, on="step_post"):
            loss.backward()
            optimizer.step()

    Args:
        optimizer: A ``torch.optim.Optimizer``, or a wrapper that keeps one (Accelerate's, Lightning's, DeepSpeed's):
            the hook is put on the one inside, is called with it, and fires for the steps that this one makes.
        hook: Called as its kind says: ``(optimizer, args, kwargs)`` around a step, where ``args[0]`` is the
            optimizer; ``(optimizer)`` or ``(optimizer, state_dict)`` on saving and loading. Where it declares a
            keyword-only ``site``, it gets an `OptimizerSite`.
        on: ``step_pre`` (may return ``(args, kwargs)`` for the step), ``step_post``, ``state_dict_pre``,
            ``state_dict_post`` and ``load_state_dict_pre`` (may return another state dict), or
            ``load_state_dict_post``.
        prepend: Run before the hooks of ours that are there already.
        observe: Ignore the return value, and run after all edits (``step_pre``).
        name: A name for reports; the function's own by default.

    One step fires its hooks once, also where ``step`` calls ``super().step()``; a step that raises has no
    ``step_post``; a step that a ``GradScaler`` skips fires nothing, but for optimizers with ``fused=True``, which are
    called either way and have the scaler's ``found_inf``.

    Raises:
        UnhookableError: if it is no optimizer, or wraps one in an attribute that is not known.
        KindError, OptionError, HookSignatureError: before anything is attached.
    """
    kind = Kind.parse(on, OPTIMIZER)
    optimizer = checked_optimizer(optimizer)
    options = AttachOptions(prepend=prepend, observe=observe, name=name)
    attachment = new_attachment(hook, kind, options, site_type=OPTIMIZER)
    with attaching(attachment) as handle:
        hooks = _existing_hooks(optimizer) or _OptimizerHooks()
        hooks.add(attachment, type(optimizer).__name__, optimizer)
    return handle


def hook_optimizers_everywhere(attachment: Attachment) -> HookHandle:
    """Put an attachment of a step kind on every optimizer there is and will be.

    It runs where torch runs hooks of the process: before those of the optimizer itself, and after a step behind them.
    """
    with attaching(attachment) as handle:
        _EVERYWHERE.add(attachment, "(every optimizer)", None)
    return handle


def optimizer_entries(optimizer: Optimizer) -> tuple[HookAtSite, ...]:
    """Return the hooks of ours on the optimizer itself, or inside it; those on every optimizer are on none in
    particular.
    """
    optimizer = unwrap_optimizer(optimizer)
    hooks = _existing_hooks(optimizer) if takes_hooks(optimizer) else None
    return () if hooks is None else hooks.entries


class _OptimizerHooks(HookContainer):
    """All hooks of ours on one optimizer, or on every one; torch has a `_TorchHook` of each kind for them."""

    def __init__(self) -> None:
        self.entries: tuple[HookAtSite, ...] = ()
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """The newest step of each optimizer, counted from 0 since the first hook came on."""
        self._handles: dict[Kind, RemovableHandle] = {}

    def add(self, attachment: Attachment, name: str, optimizer: Optimizer | None) -> None:
        """Put a hook on the optimizer, or, without one, on all; under LOCK."""
        if not self.entries:
            self._leave()
        self.entries += (HookAtSite(attachment, name, self, NO_MODEL),)
        self._register(optimizer, attachment.kind)
        if not _torch.being_walked(_torch.optimizer_hooks(optimizer, Kind.STEP_PRE)):
            self._register(optimizer, Kind.STEP_PRE)  # which counts the steps

    def _register(self, optimizer: Optimizer | None, kind: Kind) -> None:
        """Have torch call us for hooks of a kind."""
        handle = self._handles.get(kind)
        if handle is not None and handle.id in _torch.optimizer_hooks(optimizer, kind):
            return
        hook = _TorchHook(self, kind)
        if optimizer is None:
            self._handles[kind] = getattr(torch_optimizer, f"register_optimizer_{kind}_hook")(hook)
        else:
            self._handles[kind] = getattr(Optimizer, f"register_{kind}_hook")(optimizer, hook)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; with the last one go torch's hooks."""
        self.entries = tuple(other for other in self.entries if other is not entry)
        if not self.entries:
            self._leave()

    def _leave(self) -> None:
        """Take torch's hooks off. One that torch is walking over does nothing, and goes before the next hook comes."""
        self.steps.clear()
        for kind, handle in tuple(self._handles.items()):
            hooks = handle.hooks_dict_ref()
            if hooks is None or not _torch.being_walked(hooks):
                handle.remove()
                del self._handles[kind]


class _TorchHook:
    """What torch calls, for one optimizer and kind."""

    def __init__(self, hooks: _OptimizerHooks, kind: Kind) -> None:
        self.hooks = hooks
        self._kind = kind

    @_torch.untraced  # an optimizer imports the compiler anyhow
    def __call__(self, optimizer: Optimizer, *given: Any) -> Any:
        kind, steps = self._kind, self.hooks.steps
        if not self.hooks.entries or (kind in _STEP_KINDS and _torch.is_inner_step(optimizer)):
            return None
        if kind is Kind.STEP_PRE:
            steps[optimizer] = steps.get(optimizer, -1) + 1
        values = given
        due = [entry for entry in self.hooks.entries if entry.attachment.kind is kind]
        for entry in sorted(due, key=lambda entry: entry.rank):
            entry.count()
            site = None
            if entry.attachment.wants_site:
                site = OptimizerSite(type(optimizer).__name__, optimizer, kind, steps.get(optimizer, -1))
            result = entry.call(optimizer, values, site)
            if result is not None and not entry.attachment.options.observe:
                values = _edited(values, result, optimizer, entry)
        if values is given:
            return None
        return values if kind is Kind.STEP_PRE else values[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # torch leaves hooks out when it copies an optimizer; a subclass that does not, copies one that does nothing.
        return Inert, ()


def _existing_hooks(optimizer: Optimizer) -> _OptimizerHooks | None:
    """Return the hooks on an optimizer, found through whichever torch hook of ours it carries."""
    for kind in OPTIMIZER.args:
        for hook in tuple(_torch.optimizer_hooks(optimizer, kind).values()):
            if isinstance(hook, _TorchHook):
                return hook.hooks
    return None


def _edited(values: tuple[Any, ...], result: Any, optimizer: Optimizer, entry: HookAtSite) -> tuple[Any, ...]:
    """Return the arguments to go on with, after a hook that returned ``result``."""
    kind = entry.attachment.kind
    if kind is Kind.STEP_PRE:
        match result:
            case (tuple() as args, dict()) if type(result) is tuple and args and args[0] is optimizer:
                return result
        wanted = "(new_args, new_kwargs), a tuple that begins with the optimizer and a dict"
    elif kind in _STATES_TO_REPLACE:
        if isinstance(result, dict):
            return (result,)
        wanted = "a state dict"
    else:
        return values
    raise HookReturnError(
        f"{kind.value} hook {entry.attachment.name!r} on {type(optimizer).__name__} must return None or {wanted}, "
        f"but got {type_name(result)}."
    )


_EVERYWHERE: Final = _OptimizerHooks()


# -- wrappers --------------------------------------------------------------------------------------------------------


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers of `optimizer`; `optimizer` itself if there is none inside."""
    found = optimizer
    for _ in range(_DEEPEST):
        inner = _inside(found)
        if inner is None:
            return found
        found = inner
    return optimizer


def takes_hooks(optimizer: Any) -> bool:
    """Return whether torch keeps hooks of every kind for `optimizer`."""
    return isinstance(optimizer, Optimizer) and all(
        _torch.takes_optimizer_hooks(optimizer, kind) for kind in OPTIMIZER.args
    )


def _inside(wrapper: Any) -> Any:
    """Return the optimizer that `wrapper` hands its steps to; None if `wrapper` makes its steps itself."""
    own = getattr(wrapper, "__dict__", None)
    # A learning-rate scheduler keeps an optimizer too, and an engine of DeepSpeed is a module: both are no optimizer.
    is_optimizer = all(callable(getattr(wrapper, name, None)) for name in ("step", "zero_grad"))
    if own is None or not is_optimizer or isinstance(wrapper, type | nn.Module):
        return None
    is_hooked_itself = takes_hooks(wrapper)
    for name in _INNER:
        inner = own.get(name)
        if inner is None or inner is wrapper or not (isinstance(inner, Optimizer) or takes_hooks(_inside(inner))):
            continue
        if not is_hooked_itself or (takes_hooks(inner) and _share_hooks(wrapper, inner)):
            return inner
    return None


def _share_hooks(wrapper: Any, inner: Any) -> bool:
    """Return whether both have the same dictionary of hooks: Lightning's wrapper copies its optimizer's attributes."""
    return _torch.optimizer_hooks(wrapper, "step_pre") is _torch.optimizer_hooks(inner, "step_pre")


def checked_optimizer(given: Any) -> Optimizer:
    """Return the optimizer that `given` is or wraps; raise unless torch can call hooks on it."""
    optimizer = unwrap_optimizer(given)
    if not isinstance(optimizer, Optimizer):
        raise UnhookableError(
            f"attach_optimizer takes a torch.optim.Optimizer, got {type_name(given)}. Of a wrapper, pass the optimizer "
            "inside it."
        )
    if not takes_hooks(optimizer):
        raise UnhookableError(
            f"{type(optimizer).__name__} has no place for hooks: it wraps an optimizer without being set up as one "
            "itself. Pass the optimizer inside it."
        )
    return optimizer
