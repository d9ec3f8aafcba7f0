"""Attach a hook to functions: of torch, of the dispatcher, of the user's own; and call it.

Users and debug/precision/precision_checker.py call `attach_function`; ``specs.apply_specs``, which makes its own
`Attachment`, calls `attach_to_functions`. ``function_names`` says which functions a target means. Each function gets
one *entry*, a `HookAtSite` (``hook_at_site``), in a `Scope`: that of a model, of this thread, or `ANYWHERE` for classes
without a model. ``find`` lists the hooks of a model's scope, which is ``ModuleHooks.around``.

Two modes in each thread see the calls. The `CallGuard` of a model (``module_hooks``) enters and leaves its scope around
each forward. torch shows functions to a function mode, operators (``aten.mm``) to a dispatch mode, and an
``autograd.Function`` class to neither: such a class gets one more base while it has hooks (`_Patch`). All three ask the
`_Thread` for the hooks of the scopes that it is in. Gradients are watched as a module's are (`GradientCall` of
``gradients``), with `FunctionHooks` in the place of `ModuleHooks`.

What must stay so:

- Whoever changes the entries of a scope holds `LOCK`, and calls `_publish` before letting go of it. Threads look into
  their tables without a lock. They make them anew under `LOCK`, after a `_publish` and where they enter or leave a
  scope.
- Modes are a stack per thread, and whoever leaves a ``with`` block takes off what is on top. So ours go *under* the
  modes that are there, and are taken out from among them; the modes of others stay in their order.
- Functions that ``gradients`` calls for the gradients fire no hooks: ``_torch.called_by_us(2)`` looks two frames up for
  the code that called the function. So it has to be called straight from ``__torch_function__`` or
  ``__torch_dispatch__``, and no decorator may come between these and torch. Only calls made in sites/gradients.py are
  passed over: a function of torch that this file called itself would fire hooks.
- What runs around a call of a model and must not be compiled is named in `_torch.leave_to_python` at the end.

Tests are in tests/sites/functions; tests/conftest.py sets `_State.warned`. For a new option see the head of ``attach``.
For a new kind see the head of ``kinds``; here `FunctionHooks` calls it, and `_KINDS` of tests/helpers_sites.py has a
row for functions, one for operators and one for classes.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline import tree
from hookline.errors import HooklineWarning, HookReturnError, KindError, TargetError, UnhookableError
from hookline.messages import caller_stacklevel, type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.functions.function_names import Place, find_places
from hookline.sites.gradients import GradientCall, GradientHooks
from hookline.sites.handle import HookHandle, attaching
from hookline.sites.hook_at_site import NO_MODEL, AttachOptions, FunctionSite, HookAtSite, HookContainer, next_order
from hookline.sites.kinds import FUNCTION, GRADIENT_KINDS, Kind
from hookline.sites.module_hooks import LOCK, counter_of, hooks_of_module
from hookline.sites.receipt import NOT_CALLED
from hookline.sites.targets import found_by
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.hook_types import Hook
    from hookline.sites.gradients import CallState
    from hookline.sites.hook_at_site import Attachment, ForwardCounter


def attach_function(
    target: Any,
    hook: Hook,
    *,
    on: str | Kind = Kind.FORWARD,
    within: nn.Module | None = None,
    exclude: Any = None,
    prepend: bool = False,
    observe: bool = False,
    name: str | None = None,
    strict: bool = True,
) -> HookHandle:
    """Put a hook on functions, wherever they are called.

    Recipe::

        def hook(fn, inputs, outputs):
            print(fn.name, fn.module, fn.call, outputs[0].shape)


        with hookline.attach_function("*.softmax", hook, within=model):
            model(x)

    The hook is called as ``(fn, inputs)`` for ``forward_pre``, ``(fn, inputs, outputs)`` for ``forward``,
    ``(fn, grad_outputs)`` for ``backward_pre`` and ``(fn, grad_inputs, grad_outputs)`` for ``backward``, where ``fn``
    is a `FunctionSite` and the rest are tuples of tensors. It may return tensors to go on with. A function that gives
    its input back as it is (``contiguous``, ``to``) has no gradient of its own: an edit is shown None there.

    Args:
        target: A function of torch (``torch.nn.functional.relu``); a name or glob over all names that such functions
            go by (``"torch.nn.functional.*"``, ``"*.relu"``) or a compiled regular expression; an operator or a glob
            over them (``torch.ops.aten.mm``, ``"aten.mm*"``, ``"mylib.op"``); a subclass of
            ``torch.autograd.Function`` or its full name; or a list of these, each of which has to match.
        hook: As above. Where it declares a keyword-only ``site``, it gets one.
        on: ``forward_pre``, ``forward``, ``backward_pre`` or ``backward``; operators have the first two.
        within: Only calls made in the forwards of this model count, in whichever thread: what ``model(x)`` calls, not
            ``model.forward(x)``, nor a part of it called alone. Without it, functions of torch and operators count in
            this thread, classes in all threads.
        exclude: Functions to leave out, in the same grammar as ``target``.
        prepend: Run before the hooks of ours that are there already.
        observe: Ignore the return value, and run after all edits.
        name: A name for reports; the hook's own by default.
        strict: Raise if nothing matches; with False, warn and return a handle on nothing.

    Functions that are called inside another function of torch are not seen: ``nn.MultiheadAttention`` calls
    ``torch.nn.functional.multi_head_attention_forward``, and the softmax in there shows as ``aten._softmax``.
    Operators are seen below autograd: what a hook returns there is not differentiated, and every other operator takes
    some microseconds more meanwhile. A ``backward`` hook that may return a value does not go with functions that change
    a tensor itself (``add_``, ``+=``), and is left out of those that a glob matches; an observer is not.

    Raises:
        NoMatchError: (a KeyError) naming the nearest functions.
        UnhookableError: for a function whose calls torch shows to no one.
        KindError, OptionError, TargetError, HookSignatureError: before anything is attached.
    """
    attachment = new_attachment(
        hook,
        Kind.parse(on, FUNCTION),
        AttachOptions(prepend=prepend, observe=observe, name=name),
        site_type=FUNCTION,
        everywhere=within is None,
    )
    if within is not None and not isinstance(within, nn.Module):
        raise TargetError(f"within= takes a torch.nn.Module, got {type_name(within)}.")
    places = found_by(lambda: find_places(target, exclude=exclude), strict=strict)
    return attach_to_functions(attachment, places, within)


def attach_to_functions(attachment: Attachment, places: list[Place], within: nn.Module | None) -> HookHandle:
    """Attach to all of the places, or to none."""
    places = _able(attachment, places)
    began = threading.get_ident(), _torch.sequence_number()
    with attaching(attachment) as handle:
        # Without a model, hooks on classes count in all threads, hooks on other functions in this thread.
        scope = _THREADS.this.own if within is None else _scope_of(unwrap(within), attachment.kind)
        for_classes = ANYWHERE if within is None else scope
        _restore_classes()
        scope.counter.serve(attachment)
        attachment.on_remove = lambda attachment: _take_off(attachment, scope, began)
        for place in places:
            each = for_classes if isinstance(place.func, type) else scope
            each.add(attachment, place)
        _publish()
    return handle


def _able(attachment: Attachment, places: list[Place]) -> list[Place]:
    """Return the places where the hook can work; of several, the others are left out. Raise if there is none.

    Operators have no gradients. Where a function changes the tensor itself, no gradient of it can be edited.
    """
    kind = attachment.kind
    operator = next((place for place in places if place.is_operator), None)
    if operator is not None and kind in GRADIENT_KINDS:
        raise KindError(
            f"on={kind.value!r} does not go with {operator.name}: operators are seen below autograd, where there are "
            "no gradients. Hook the function of torch that calls it, the module, or a torch.autograd.Function."
        )
    if kind is not Kind.BACKWARD or not attachment.may_edit or attachment.options.observe:
        return places
    able = [place for place in places if not place.changes_tensor]
    if places and not able:
        raise KindError(
            f"on={kind.value!r} does not go with {places[0].name} for a hook that may return gradients: it changes the "
            "tensor itself, for which no alias can stand in. Pass observe=True to watch its gradients."
        )
    return able


def _take_off(attachment: Attachment, scope: Scope, began: tuple[int, int]) -> None:
    """Take all entries off, and the scope off its model if it has no other hooks on functions.

    `HookHandle.remove` calls this, and holds `LOCK`.
    ``began`` is the thread that attached them, and the number that its next graph node had then.
    """
    for entry in attachment.entries:
        entry.container.discard(entry)
    _publish()
    _restore_classes()
    # If this thread has made graph nodes, the hook could have fired, though no forward of a model has begun: the
    # receipt then warns of a hook that never did.
    if began[0] == threading.get_ident() and began[1] < _torch.sequence_number():
        for entry in attachment.entries:
            if entry.counter.step == entry.step_at_attach:
                entry.step_at_attach = NOT_CALLED
    model = scope.counter.model()
    if model is not None and not scope.hooks:
        hooks_of_module(model).set_around(None)


def _scope_of(model: nn.Module, kind: Kind) -> Scope:
    """Return the scope of a model, made if there is none; its hooks count from the next forward on."""
    counter = counter_of(model, kind)
    module_hooks = hooks_of_module(model)
    scope = module_hooks.around
    if scope is None:
        scope = Scope(counter)
        module_hooks.set_around(scope)
    return scope


_Others: TypeAlias = "tuple[weakref.ref[Scope], ...]"


# -- what torch calls ----------------------------------------------------------------------------------------------


class _Mode:
    """A mode of one thread; it is on its stack exactly while there are hooks for it."""

    stack: _torch.ModeStack
    is_on = False

    def __init__(self, thread: _Thread) -> None:
        super().__init__()
        self.thread = thread

    def switch(self, *, wanted: bool) -> None:
        """Put the mode on its stack, or take it off.

        While one of our hooks runs, torch keeps the mode aside and puts it back after: then `take_out` fails, and the
        next call of this takes it off.
        """
        if wanted and not self.is_on:
            self.stack.slip_under(self)
            self.is_on = True
        elif self.is_on and not wanted:
            self.is_on = not self.stack.take_out(self)


class _FunctionMode(_Mode, TorchFunctionMode):
    """Torch calls it for every function of torch while it is on the stack of its thread."""

    stack = _torch.FUNCTION_MODES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = self.thread.hooks_on(func)
        if hooks is not None and is_dynamo_compiling():
            _warn_compiled()
        if hooks is None or is_compiling() or _torch.called_by_us(2):
            return func(*args, **kwargs) if kwargs else func(*args)
        return hooks.call(func, args, kwargs or {}, self.thread)


class _OperatorMode(_Mode, _torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch calls it for every operator, below autograd: edits count for the run, and not for its gradients.

    It keeps its thread: on a GPU, a backward pass runs in a thread of autograd, to which torch lends the modes of the
    thread that called ``backward()``. The hooks of that one count.
    """

    stack = _torch.DISPATCH_MODES
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's way to skip it imports the compiler; `leave_to_python` does not

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch compiles nothing while it is on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = self.thread.hooks_on(func)
        if hooks is not None and _torch.is_tracing():
            _warn_compiled()
            hooks = None
        if hooks is None or self.thread.in_class_hook or _torch.called_by_us(2):
            return func(*args, **kwargs) if kwargs else func(*args)
        return hooks.call(func, args, kwargs or {}, self.thread)


class _Patch:
    """One ``autograd.Function`` class that has a base of ours while it has hooks.

    Another ``apply`` would not do: most people keep a reference (``relu = MyReLU.apply``). ``apply`` looks up what it
    calls in the bases of the class, by ``super()``: so a base of ours stands between torch's own ``Function`` and the
    C++ one behind it. Where ``apply`` itself is the C++ one (from torch 2.14 on), our base stands before torch's, and a
    reference that was taken before the hook was attached goes past it.
    """

    def __init__(self, place: Place) -> None:
        self.cls = cls = place.func
        self.users: WeakSet[Attachment] = WeakSet()
        """The hooks on it; one that is bound to a model goes with that, and is kept by the scope of the model."""
        self._base = self._make_base()
        own = cls.__bases__
        try:
            cls.__bases__ = (*own, self._base) if _torch.APPLY_IS_PYTHON else (self._base, *own)
        except TypeError as error:
            raise UnhookableError(f"{place.name} cannot be hooked: its bases cannot be changed ({error}).") from None

    def _make_base(self) -> type:
        hooked = self.cls

        class Hooked(_torch.FunctionBase):
            """Stands before the C++ half of ``autograd.Function``."""

            @classmethod
            def apply(cls, *args: Any, **kwargs: Any) -> Any:
                # A reference to this method may be kept, and used when the base is taken away again.
                run = super().apply if Hooked in cls.__mro__ else cls.apply  # type: ignore[misc]
                # A subclass is another function.
                thread = _THREADS.this
                hooks = None if thread.in_class_hook or cls is not hooked else thread.hooks_on(cls)
                return run(*args, **kwargs) if hooks is None else hooks.call(run, args, kwargs, thread)

        return Hooked

    def restore(self) -> None:
        """Give the class its own bases back; whatever else was done to them stays."""
        self.cls.__bases__ = tuple(base for base in self.cls.__bases__ if base is not self._base)


_PATCHED: Final[dict[type, _Patch]] = {}
"""The classes that have hooks now; to be changed under LOCK."""


def _restore_classes() -> None:
    """Give the classes their own bases back that have no hooks any more; under LOCK.

    A class whose hooks went with their model waits for the next hook on a function that comes or goes.
    """
    for patch in tuple(_PATCHED.values()):
        if all(attachment.removed for attachment in patch.users):
            patch.restore()
            del _PATCHED[patch.cls]


def _unseen(hook: Any) -> Any:
    """Return a hook on a class whose own calls of functions have no hooks; for modes, torch sees to that itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        thread = _THREADS.this
        before, thread.in_class_hook = thread.in_class_hook, True
        try:
            return hook(*args, **kwargs)
        finally:
            thread.in_class_hook = before

    return run


# -- one call of a function ----------------------------------------------------------------------------------------
_PLAIN: Final = (type(None), bool, int, float, str)
_Tensors: TypeAlias = tuple[Tensor, ...]


class FunctionHooks(GradientHooks):
    """The live hooks of one function, in the order they run."""

    def __init__(self, name: str, func: Callable[..., Any], entries: Iterable[HookAtSite]) -> None:
        self._name = name
        self._func = func
        ordered = sorted(entries, key=lambda entry: entry.rank)
        by_kind = [tuple(entry for entry in ordered if entry.attachment.kind is kind) for kind in FUNCTION.args]
        self._forward_pre, self._forward, backward_pre, backward = by_kind
        self.set_gradient_hooks(backward_pre, backward)
        self.told = ()  # a `FunctionSite` has step and call itself, so nothing is to be counted for them
        self._counters = tuple(dict.fromkeys(entry.counter for entry in ordered))

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], thread: _Thread) -> Any:
        """Return the function's result, with its hooks around it; ``run`` is the function itself.

        The hooks after the call are those that ``thread`` has by then: one before it may change them.
        """
        fn = FunctionSite(self._name, self._func, args, kwargs, self._counters)
        given = _tensors_in((*args, *kwargs.values()) if kwargs else args)
        inputs = passed = _fire(self._forward_pre, fn, given, ())
        wiring = GradientCall(self, fn, next_order()) if self.has_gradients and torch.is_grad_enabled() else None
        if wiring is not None:
            passed, state = wiring.enter(inputs, {})
        if passed is not given:
            args, kwargs = _with_tensors((args, kwargs), passed)
        output = run(*args, **kwargs)
        # What is given back, as by ``to``, stays itself: torch lets nobody write into an alias.
        if passed is not inputs:
            originals = {id(alias): tensor for alias, tensor in zip(passed, inputs, strict=True)}
            output = tree.replace(output, lambda tensor: originals.get(id(tensor), tensor))
        outputs = (output,) if isinstance(output, Tensor) else _tensors_in((output,))
        now = thread.hooks_on(self._func)
        edited = outputs if now is None else _fire(now._forward, fn, outputs, (inputs,))
        fn.let_go()
        if wiring is not None:
            edited = _watch_outputs(wiring, state, edited)
        return output if edited is outputs else _with_tensors(output, edited)


def _tensors_in(values: Iterable[Any]) -> _Tensors:
    """Return every tensor among the arguments, in containers too, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, _PLAIN):
            found += tree.tensors_of(value)
    return tuple(found)


def _with_tensors(value: Any, tensors: _Tensors) -> Any:
    """Return ``value`` with other tensors; lists and dicts in it are copied, since they may be the caller's."""
    fresh = iter(tensors)
    return tree.map_tensors(value, lambda _, tensor: next(fresh))


def _watch_outputs(wiring: GradientCall, state: CallState, outputs: _Tensors) -> _Tensors:
    """Watch the gradients of outputs; return the outputs to go on with.

    A leaf (what a factory makes, with ``requires_grad=True``) has none that comes through the function, and has to
    stay a leaf.
    """
    if any(tensor.grad_fn is None and tensor.requires_grad for tensor in outputs):
        return outputs
    watched: _Tensors = wiring.leave(outputs, state)
    return watched


def _fire(
    entries: tuple[HookAtSite, ...], fn: FunctionSite, tensors: _Tensors, before: tuple[_Tensors, ...]
) -> _Tensors:
    """Call hooks with ``before`` and the tensors; return the tensors as edited.

    ``before`` are the arguments that come first: for forward hooks, the tuple of inputs.
    """
    for entry in entries:
        entry.fired += 1
        shown = fn.seen_from(entry.counter)
        entry.last_step = shown.step
        if entry.simple:
            result = entry.hook(shown, *before, tensors)
        else:
            site = shown.site(entry.attachment.kind, recompute=fn.recompute) if entry.attachment.wants_site else None
            result = entry.call(shown, (*before, tensors), site)
        if result is not None and not entry.attachment.options.observe:
            tensors = _checked(result, tensors, entry)
    return tensors


def _checked(result: Any, tensors: _Tensors, entry: HookAtSite) -> _Tensors:
    """Return a hook's return value as tensors to go on with."""
    new = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(new) == len(tensors) and all(isinstance(item, Tensor) for item in new):
        return new
    wanted = "a tensor" if len(tensors) == 1 else f"a tuple of {len(tensors)} tensors"
    items = f" of ({', '.join(type(item).__name__ for item in new)})" if isinstance(result, tuple | list) else ""
    raise HookReturnError(
        f"{entry.attachment.kind.value} hook {entry.attachment.name!r} on {entry.name!r} must return None or {wanted}, "
        f"as it was shown, but got {type_name(result)}{items}. With observe=True the return value is ignored."
    )


# -- the scopes of hooks -------------------------------------------------------------------------------------------


class _HooksByFunction(dict[Any, FunctionHooks]):
    """The hooks of some scopes, by function, operator or class."""

    def __init__(self, scopes: tuple[Scope, ...]) -> None:
        gathered: dict[Any, list[HookAtSite]] = {}
        for scope in scopes:
            for entry, func in scope.hooks.items():
                gathered.setdefault(func, []).append(entry)
        super().__init__((func, FunctionHooks(hooks[0].name, func, hooks)) for func, hooks in gathered.items())
        self.has_operators = any(isinstance(func, _torch.OpOverload) for func in self)
        self.has_functions = any(not isinstance(func, _torch.OpOverload | type) for func in self)


class Scope(HookContainer):
    """The hooks on functions that count in the forwards of one model, in one thread, or everywhere.

    That of a model is kept with the model, so that a hook which refers to its own model does not keep it alive.
    """

    def __init__(self, counter: ForwardCounter = NO_MODEL) -> None:
        self.counter = counter
        self.hooks: dict[HookAtSite, Any] = {}
        """The hooks, in the order they came, each with its function, operator or class."""
        self._made_at = -1  # as `_State.published` was
        # The tables for this scope together with others, by these; weak, since they may be of models that are gone.
        self._together: dict[_Others, _HooksByFunction] = {}

    def enter(self) -> None:
        """Begin a forward of the model in this thread: the hooks fire for calls from now on."""
        self.counter.begin()
        thread = _THREADS.this
        thread.entered.append(self)
        thread.settle()

    def leave(self) -> None:
        """End it, however it ended."""
        thread = _THREADS.this
        if self in thread.entered:
            thread.entered.remove(self)
        thread.settle()

    def entries(self) -> Iterator[HookAtSite]:
        """Return one entry of each attachment."""
        yield from {entry.attachment: entry for entry in self.hooks}.values()

    def add(self, attachment: Attachment, place: Place) -> None:
        """Put a hook on a function; `_publish` makes it count."""
        entry = HookAtSite(attachment, place.name, self, self.counter)
        if isinstance(place.func, type):
            if place.func not in _PATCHED:
                _PATCHED[place.func] = _Patch(place)
            _PATCHED[place.func].users.add(attachment)
            entry.hook = _unseen(entry.hook)
        self.hooks[entry] = place.func

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; `_publish` makes that count."""
        self.hooks.pop(entry, None)

    def with_others(self, others: tuple[Scope, ...]) -> _HooksByFunction:
        """Return the hooks that count while a thread is in this scope and these."""
        if self._made_at != _State.published:
            self._made_at, self._together = _State.published, {}
        key = tuple(map(weakref.ref, others))
        found = self._together.get(key)
        if found is None:
            found = self._together[key] = _HooksByFunction((*others, self))
        return found


class _State:
    published = 0
    """How often hooks have come or gone; a table that was made at another number is out of date."""
    warned = False
    """Whether it was said that compiled code shows no functions."""


@_torch.constant_while_tracing
def _warn_compiled() -> None:
    if not _State.warned:
        _State.warned = True
        warnings.warn(
            "Something is being compiled that calls functions or operators with hooks: these fire only in eager code. "
            "Hook the module instead, or run that part eagerly (torch.compiler.disable).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


ANYWHERE: Final = Scope()
"""The hooks on classes that are bound to no model: they count in all threads."""


# -- the threads ---------------------------------------------------------------------------------------------------


class _Thread:
    """The scopes that one thread is in, their hooks, and the modes that see calls for them."""

    def __init__(self) -> None:
        self.own = Scope()
        """The hooks that were put on in this thread without a model."""
        self.in_class_hook = False
        """Whether a hook on a class runs, whose own calls go unseen."""
        self.entered: list[Scope] = []
        """The scopes of models, as often as each was entered."""
        self._hooks: _HooksByFunction
        self._made_at = -1
        self._functions = _FunctionMode(self)
        self._operators = _OperatorMode(self)

    def hooks_on(self, func: Any) -> FunctionHooks | None:
        """Return the hooks on a function that count in this thread now."""
        return self._all_hooks().get(func)

    def _all_hooks(self) -> _HooksByFunction:
        if self._made_at != _State.published:
            with LOCK:
                self._made_at = _State.published
                *others, last = dict.fromkeys((ANYWHERE, self.own, *self.entered))
                self._hooks = last.with_others(tuple(others))
        return self._hooks

    def settle(self) -> None:
        """Have each mode on its stack exactly while there are hooks for it."""
        self._made_at = -1
        hooks = self._all_hooks()
        self._operators.switch(wanted=hooks.has_operators)
        self._functions.switch(wanted=hooks.has_functions)


def _publish() -> None:
    """Let every thread make its table anew for its next call, since hooks have come or gone; under LOCK.

    The modes of another thread stay on its stacks, which it alone may change, and see no hooks.
    """
    _State.published += 1
    _THREADS.this.settle()


class _Threads(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self.this = _Thread()


_THREADS: Final = _Threads()


_torch.leave_to_python(Scope.enter, Scope.leave, _OperatorMode.__torch_dispatch__)
