"""Keep the hooks of one module, and what torch calls for them: slots in torch's own dictionaries.

Words used here: an *entry* is one hook at one place (`HookAtSite`). An *observer* is one with ``observe=True``, an
*edit* one without. A *slot* (`Slot`) is what torch calls; its id is the same on every module (`FIRST`, `LAST`). There
are four around a call, each made where it is needed: the two *pre-slots*, `FIRST_PRE` for edits and `LAST_PRE` for
observers, and after the call `FIRST_FORWARD` and `LAST_FORWARD`, likewise. Each other kind has one (`_KIND_ROWS`).
``plan`` says in letters what a call has to do for gradients (`plan_of` of ``compiled.compiled_gradients``); eager calls
only ask whether it is empty. For gradients `LAST_PRE` leaves two things to `LAST_FORWARD`: when the call began
(``entered`` and ``began`` of `GradientHooks`), and a `CallState`. That is a dictionary: it goes on in place of the
keyword arguments of the call, so that it comes along with the call itself, or is kept in ``noted``. These and the other
flags of gradients are attributes of `GradientHooks`: read the head of ``gradients`` first.

``attach``, ``attach_everywhere`` and ``parameters`` add entries, ``attach_function`` puts a `Scope` around the calls of
a model, and handles take entries off. ``find`` and ``debug.diagnose`` list them; ``compiled.op_runtime`` finds them by
key. ``find``, ``everywhere``, ``debug.diagnose`` and ``engines.vllm`` tell our hooks from those of others by `Slot`;
``everywhere._first_sight`` and ``engines.vllm.taps`` also call slots themselves, as torch does; ``optimizers`` leaves
an `Inert` in copies too. After each change around calls, `recompile_guard.set_own_forward` makes compiled code notice
it, and an `AttentionPart` is told.

What must stay so:

- A slot is never changed: a hook that comes or goes puts another in its place. So the order in the queue stays, and a
  firing that is under way, which goes by a snapshot that torch has taken, runs the hooks that were on when it began.
  (Of saving and loading torch takes no snapshot: `_take_off`.)
- No table of the process refers strongly to a `ModuleHooks`; the slots on the module do, so a hook that refers to its
  own model does not keep that alive. (The list of process-wide hooks does, by their entries, while such a hook is on;
  `_forget` drops an entry when its module is gone.) A module without hooks has neither slots nor a `ModuleHooks`.
- Hooks come and go under `LOCK`. A firing on a module takes it only here: where a model with hooks on functions begins
  and ends (`CallGuard`, for a `Scope`), where a slot is not at its end any more (`_keep_places`), where a part of a
  model is called and the model is not (`_count_by_part`), at the first call of a module (``everywhere._first_sight``),
  where a parameter was replaced (``parameters._follow``).
- The compiler traces ``__call__`` of the slots around a call, up to ``run_pre`` and ``run_post``: each attribute that
  is read before these becomes a guard of the compiled code. Of the slots of observers it may read only what never
  changes (`_torch.Unchanging`); what it reads of those of edits are the user's own objects.

A new `Kind` that torch keeps a dictionary for is a row of `_KIND_ROWS`, and the dictionary one of
``_torch.HOOK_DICTS``; the head of ``kinds`` lists all steps. A new slot around a call is a row of `_CALL_ROWS`, put in
place by `ModuleHooks._sync_calls`. All four pairs of dictionary and id are taken, so it needs an id of its own, whose
place in the queue `_put` and `_keep_places` have to know; a pre-slot is run by ``everywhere._first_sight`` too. Tests:
tests/sites, above all test_conformance_*.py and compiled.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.errors import HooklineWarning, UnhookableError
from hookline.sites import _torch
from hookline.sites.attention import AttentionPart
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.compiled_gradients import plan_of
from hookline.sites.compiled.op_schemas import keep_maker
from hookline.sites.compiled.trace_hooks import new_arguments, run_post, run_pre
from hookline.sites.gradients import USE_INPUT_ONCE, CallState, GradientCall, GradientHooks, is_flat, tap_output
from hookline.sites.hook_at_site import ForwardCounter, HookAtSite, next_order
from hookline.sites.kinds import CALL_KINDS, GRADIENT_KINDS, STATE_KINDS, Kind
from hookline.sites.wrappers import WRAPPER_KEYS, unwrap, walk

if TYPE_CHECKING:
    from hookline.sites.functions.attach_function import Scope
    from hookline.sites.hook_at_site import Attachment

LOCK: Final = threading.RLock()
"""Held while hooks come or go. Slots are replaced whole, so a firing takes it only where the head of this file says."""
_Entries = tuple[HookAtSite, ...]


# -- what torch calls ----------------------------------------------------------------------------------------------


_FIELDS: Final = ("entries", "groups", "key", "made", "module_hooks", "plan", "recipe", "steps", "ticks")
_NO_FIELDS: Final = ()


class Slot:
    """Our hooks of one module at one end of one of torch's queues; base of the slots below."""

    __slots__ = _NO_FIELDS  # each class below has them: `_torch.Unchanging` could not be a base beside this one else
    _from_public_api = True
    """torch asks its state_dict post-hooks for it."""

    slot: ClassVar[str] = ""
    """Its name in the texts of compiled graphs, by which `_CALL_ROWS` finds it; without "|" in it."""

    def __init__(self, module_hooks: Any, entries: _Entries, plan: str = "", ticks: str = "") -> None:
        self.module_hooks = module_hooks
        self.entries = entries
        self.key: torch.Tensor = module_hooks.key
        """By which compiled code finds the hooks."""
        self.made = next_order()
        """When it was made; hooks that were attached later are not in it."""
        self.plan = plan
        """What compiled calls have to know of the gradient hooks (`plan_of`). Eager calls only ask whether it is empty:
        then this slot has nothing to do for gradients."""
        self.ticks = ticks
        """Whether each call begins a forward of a model here: "t"."""
        self.steps, self.groups, self.recipe = _compiled_steps(entries, plan, ticks)

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Run the hooks."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()  # a copied or pickled model carries no hooks of ours


class Anchor(Slot):
    """Does nothing but keep the `ModuleHooks` of hooks that torch calls from elsewhere alive."""

    __slots__ = _FIELDS


class FirstPreSlot(Slot):
    """First of a module's forward pre-hooks: begins the model's forwards, runs edits."""

    __slots__ = _FIELDS
    slot = "first_pre"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        if is_dynamo_compiling():
            return _handed_back(more, run_pre(self, module, args, more[0] if more else {}))
        if self.ticks:
            self.module_hooks.begin_forward()
        given = more[0] if more else {}
        new_args, kwargs, guard = args, given, self.module_hooks.guard
        for entry in self.entries:
            result = run_one_pre(entry, module, new_args, kwargs)
            if result is not None:
                new_args, kwargs = new_arguments(entry, result, kwargs)
                if guard is not None:
                    guard.note(new_args, kwargs, None)
        return None if new_args is args and kwargs is given else _handed_back(more, (new_args, kwargs))


class LastPreSlot(Slot, _torch.Unchanging):
    """Last of a module's forward pre-hooks: observers, then the inputs' gradients."""

    __slots__ = _FIELDS
    slot = "last_pre"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        if is_dynamo_compiling():
            return _handed_back(more, run_pre(self, module, args, more[0] if more else {}))
        for entry in self.entries:
            run_one_pre(entry, module, args, more[0] if more else {})
        module_hooks = self.module_hooks
        if len(module._forward_pre_hooks) > 1:
            module_hooks.keep_places()
        if not self.plan or not torch.is_grad_enabled():
            return None
        # If a pre-hook of this call has put on a gradient hook, there is another slot by now. That hook begins with the
        # next call: this one counts as begun when this slot was made, before the hook came.
        is_current = module._forward_pre_hooks.get(LAST) is self
        order = module_hooks.entered = next_order() if is_current else self.made
        module_hooks.began = None
        if not more:  # this slot was replaced by one without keyword arguments: torch looks that up while it fires
            return None
        if module_hooks.observes_outputs:
            module_hooks.began = threading.get_ident(), order, _torch.sequence_number()
            return None
        return GradientCall(module_hooks, module, order).enter(args, more[0])


class FirstForwardSlot(Slot):
    """First of a module's forward hooks: edits."""

    __slots__ = _FIELDS
    slot = "first_forward"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        given = output = more[-1]  # as a parameter of its own, with a default value, it would be two guards more
        if is_dynamo_compiling():
            return run_post(self, module, args, _kwargs_in(more), output)
        guard = self.module_hooks.guard
        if guard is not None:
            guard.note(args, _kwargs_in(more), output)
        for entry in self.entries:
            if entry.simple:  # run_one_post, without the call: this is the hot path
                entry.fired += 1
                entry.last_step = entry.counter.step
                result = entry.hook(module, args, output)
            else:
                result = run_one_post(entry, module, args, _kwargs_in(more), output)
            if result is not None:
                output = result
                if guard is not None:
                    guard.note(args, _kwargs_in(more), output)
        return None if output is given else output


class LastForwardSlot(Slot, _torch.Unchanging):
    """Last of a module's forward hooks: observers, then the outputs' gradients."""

    __slots__ = _FIELDS
    slot = "last_forward"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        output = more[-1]
        if is_dynamo_compiling():
            return run_post(self, module, args, _kwargs_in(more), output)
        for entry in self.entries:
            if entry.simple:  # run_one_post without the call, as above
                entry.fired += 1
                entry.last_step = entry.counter.step
                entry.hook(module, args, output)
            else:
                run_one_post(entry, module, args, _kwargs_in(more), output)
        is_alone = len(module._forward_hooks) == 1
        if not is_alone:
            self.module_hooks.keep_places()
        if not self.plan or not self.module_hooks.has_gradients:
            return None
        return self._leave_gradients(module, args, _kwargs_in(more), output, is_alone=is_alone)

    def _leave_gradients(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any, *, is_alone: bool
    ) -> Any:
        """Watch the gradients of the output; return another output if that has to go on in its place.

        `_torch.backward_hooks_of_call` looks three frames up for the call by torch: put no call in between.
        """
        module_hooks = self.module_hooks
        module_hooks.calls_seen += 1
        if not torch.is_grad_enabled():
            return None
        began, module_hooks.began = module_hooks.began, None
        late = module_hooks.begins_late and began is None
        if late and is_alone:  # so the output is of this call, whenever that began
            began = threading.get_ident(), next_order(), 0
        if began is not None and tap_output(module_hooks, began, module, output):
            return None
        state = kwargs if isinstance(kwargs, CallState) else module_hooks.noted
        if module_hooks.noted is not None:
            module_hooks.noted = None
        if state is None:
            call = GradientCall(module_hooks, module, next_order() if late else module_hooks.entered)
            state = call.enter(args, dict(kwargs))[1] if late else call.enter_afterwards(began, args, kwargs)
        watched = state.call.leave(output, state)
        if module_hooks.backward_pre and _torch.has_backward_hooks(module) and is_flat(output):
            backward_hooks = _torch.backward_hooks_of_call(3)
            if backward_hooks is not None:
                state.call.run_by_torch(backward_hooks)
        return None if watched is output else watched


class FullBackwardSlot(Slot):
    """Full backward hooks. torch notes in the forward what it will call in the backward: hooks may be off by then."""

    __slots__ = _FIELDS

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        given = grad_input
        for entry in [entry for entry in self.entries if not entry.attachment.removed]:
            entry.count()
            result = entry.call(module, (grad_input, grad_output))
            if result is not None and not entry.attachment.options.observe:
                grad_input = result
        return None if grad_input is given else grad_input


class StateSlot(Slot):
    """Saving and loading. Return values mean nothing, and torch allows none."""

    __slots__ = _FIELDS

    def __call__(self, module: nn.Module, *args: Any) -> None:
        for entry in self.entries:
            entry.count()
            entry.call(module, args)


class Inert:
    """Does nothing in the place of a slot: in a copy of a hooked model, or where torch is walking its dictionary."""

    _from_public_api = True

    def __call__(self, module: nn.Module, *args: Any) -> None:
        return None


def run_one_pre(entry: HookAtSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one forward pre-hook; return what it returns."""
    if entry.simple:
        entry.count()
        return entry.hook(module, args)
    if not entry.is_due():
        return None
    entry.count()
    return entry.call(module, (args, kwargs) if entry.attachment.options.with_kwargs else (args,))


def run_one_post(entry: HookAtSite, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Run one forward hook; return what it returns."""
    if not (entry.simple or entry.is_due()):
        return None
    entry.count()
    options = entry.attachment.options
    if options.always_call and entry.container.guard is not None:
        entry.container.guard.note_ran(entry)
    return entry.call(module, (args, kwargs, output) if options.with_kwargs else (args, output))


def _kwargs_in(more: tuple[Any, ...]) -> Any:
    """Return the keyword arguments before the output, if torch hands them to the slot.

    torch looks up while it fires whether an id takes them, so a slot that was replaced meanwhile may be called without.
    """
    return more[0] if len(more) == 2 else {}


def _handed_back(more: tuple[Any, ...], new: tuple[Any, Any] | None) -> Any:
    """Return what a pre-hook has to return to torch, which has handed it keyword arguments (``more``) or not."""
    return new[0] if new is not None and not more else new


# -- how compiled code runs and finds them -------------------------------------------------------------------------


def _compiled_steps(entries: _Entries, plan: str, ticks: str) -> tuple[tuple[Any, ...], tuple[_Entries, ...], str]:
    """Return how compiled code runs the hooks of a slot (``trace_hooks``): steps, groups and recipe.

    A step is a hook that edits, one that gets a summary, or None for a group of observers, which run all together. The
    recipe has all of it in one text, since each attribute that is read while tracing becomes a guard: five fields with
    "/" between them, letters of the steps first; the head of ``trace_hooks`` explains each. ``trace_hooks.run_pre`` and
    ``run_post`` read it, ``ModuleHooks.slot_for`` its beginning, with what ``op_runtime`` has from the text of a graph:
    change all of them together.
    """
    rows: list[tuple[str, HookAtSite | None, _Entries, str]] = []
    for entry in entries:
        summary = entry.attachment.summary
        if summary is not None:  # by its number: to ask the hook for it while tracing would be three guards more
            rows.append(("s", entry, (), str(keep_maker(summary))))
        elif _is_traced(entry):
            rows.append(("e", entry, (), ""))
        elif rows and rows[-1][0] == "w":
            rows[-1] = ("w", None, (*rows[-1][2], entry), "")
        else:
            rows.append(("w", None, (entry,), ""))
    letters, steps, groups, numbers = zip(*rows, strict=True) if rows else ((), (), (), ())
    reads = {letter for group in groups for entry in group for letter in entry.attachment.reads}
    recipe = f"{''.join(letters)}/{''.join(sorted(reads))}/{plan}/{ticks}/{','.join(numbers)}"
    return steps, groups, recipe


def _is_traced(entry: HookAtSite) -> bool:
    """Return whether a hook around calls becomes part of compiled code, because it edits."""
    attachment = entry.attachment
    return not attachment.options.observe and (attachment.may_edit or attachment.in_place)


# Keys are tensors: a number would be a constant of the graph, and twelve equal blocks would need twelve graphs.
_NUMBERS: Final = itertools.count()
_BY_KEY: Final[weakref.WeakValueDictionary[int, ModuleHooks]] = weakref.WeakValueDictionary()


def _new_key(hooks: ModuleHooks) -> torch.Tensor:
    """Return a key for the hooks of a module; good for as long as these live."""
    number = next(_NUMBERS)
    _BY_KEY[number] = hooks
    with torch.inference_mode(False):  # an ordinary tensor
        return torch.scalar_tensor(number, dtype=torch.int64, device="cpu")


class HookChanges:
    """How often hooks have come to modules or gone; a class of its own, as Python stops caching one that changes."""

    count = 0
    """``op_runtime._Receivers`` keeps what it has worked out until this is another."""


def hooks_with_key(key: torch.Tensor) -> ModuleHooks | None:
    """Return the `ModuleHooks` of that key, unless they are gone."""
    return _BY_KEY.get(int(key))


# -- where torch keeps each of them --------------------------------------------------------------------------------

FIRST: Final = -1
LAST: Final = -2
"""The ids of our slots in torch's dictionaries. Torch's own are not negative."""


class Row(NamedTuple):
    """One place for a slot: at most one on each module."""

    make: type[Slot]
    hooks: str
    """Torch's dictionary."""
    hook_id: int

    def slot_on(self, module: nn.Module) -> Slot | None:
        """Return the slot that the module has there."""
        hooks = module.__dict__.get(self.hooks)
        if not hooks:  # nearly always; and a module may be half made
            return None
        found = hooks.get(self.hook_id)
        found = getattr(found, "hook", found)  # torch keeps load_state_dict pre-hooks in a wrapper
        return found if isinstance(found, Slot) else None


FIRST_PRE: Final = Row(FirstPreSlot, "_forward_pre_hooks", FIRST)
LAST_PRE: Final = Row(LastPreSlot, "_forward_pre_hooks", LAST)
FIRST_FORWARD: Final = Row(FirstForwardSlot, "_forward_hooks", FIRST)
LAST_FORWARD: Final = Row(LastForwardSlot, "_forward_hooks", LAST)
_CALL_ROWS: Final = {row.make.slot: row for row in (LAST_FORWARD, FIRST_FORWARD, FIRST_PRE, LAST_PRE)}
"""The slots around a call, by their names in compiled graphs; the one that most hooks use is first, since
`existing_hooks` looks in this order."""
_KIND_ROWS: Final[dict[Kind, Row]] = {
    Kind.FULL_BACKWARD: Row(FullBackwardSlot, "_backward_hooks", LAST),
    Kind.STATE_DICT_PRE: Row(StateSlot, "_state_dict_pre_hooks", LAST),
    Kind.STATE_DICT_POST: Row(StateSlot, "_state_dict_hooks", LAST),
    Kind.LOAD_STATE_DICT_PRE: Row(StateSlot, "_load_state_dict_pre_hooks", LAST),
    Kind.LOAD_STATE_DICT_POST: Row(StateSlot, "_load_state_dict_post_hooks", LAST),
    Kind.PARAM_GRAD: Row(Anchor, "_load_state_dict_post_hooks", FIRST),
}
"""The slots of the other kinds."""
_ROWS: Final = (*_CALL_ROWS.values(), *_KIND_ROWS.values())

# Where only what is inside a module is compiled, the compiler meets the module's own hooks as functions to compile.
for _class in (*(row.make for row in _ROWS), Inert):
    _torch.leave_to_python(_class.__call__)


# -- what is around the whole call ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Attempt:
    """One call under way: its values so far, and which of the hooks have run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    ran: set[HookAtSite] = field(default_factory=set)


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Attempt] = []


class CallGuard:
    """Wraps one module's call.

    torch runs its own ``always_call`` hooks on an Exception alone; these run on whatever ends the call, a
    KeyboardInterrupt from the forward or from a hook included. A direct call of ``module.forward()`` does not pass
    here, nor that of a copy: `recompile_guard.hide_from_copies` leaves the guard out there.
    """

    __slots__ = ("__weakref__", "_attempts", "_module", "_module_hooks")

    def __init__(self, module_hooks: ModuleHooks, module: nn.Module) -> None:
        self._module_hooks = module_hooks
        self._module: weakref.ref[Any] = weakref.ref(module)  # of this very class, which the compiler knows
        self._attempts = _Attempts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if is_dynamo_compiling():  # a compiled call cannot be cut short between two hooks
            return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[union-attr]
        around, attempt = self._module_hooks.around, _Attempt(args, kwargs)
        if around is not None:
            around.enter()
        self._attempts.stack.append(attempt)
        try:
            return getattr(type(module), _torch.CALL_IMPL)(module, *args, **kwargs)
        except BaseException:
            self._clean_up(module, attempt)
            raise
        finally:
            self._attempts.stack.pop()
            if around is not None:
                around.leave()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the values that the call has reached."""
        if self._attempts.stack:
            attempt = self._attempts.stack[-1]
            attempt.args, attempt.kwargs, attempt.output = args, kwargs, output

    def note_ran(self, entry: HookAtSite) -> None:
        """Note that ``entry`` runs."""
        if self._attempts.stack:
            self._attempts.stack[-1].ran.add(entry)

    def _clean_up(self, module: Any, attempt: _Attempt) -> None:
        for entry in self._module_hooks.hooks_of_kind(Kind.FORWARD):
            if not entry.attachment.options.always_call or entry in attempt.ran or not entry.is_due():
                continue
            entry.count()
            more = (attempt.kwargs,) if entry.attachment.options.with_kwargs else ()
            try:
                entry.call(module, (attempt.args, *more, attempt.output))
            except Exception as error:
                with suppress(HooklineWarning):  # where warnings are errors, the first error is still the one to raise
                    warnings.warn(
                        f"always_call hook {entry.attachment.name!r} on {entry.name!r} raised {error!r}; silenced, "
                        "because another error was raised in the forward.",
                        HooklineWarning,
                        stacklevel=3,
                    )


_torch.leave_to_python(CallGuard.__call__, below=False)
_torch.leave_to_python(CallGuard._clean_up, _Attempt.__init__)


# -- the hooks of one module ---------------------------------------------------------------------------------------


class ModuleHooks(GradientHooks):
    """The hooks of one module."""

    guard: CallGuard | None = None
    around: Scope | None = None
    """What is entered before each call of the module and left after it; if it is there, it counts the forwards."""
    counter: ForwardCounter | None = None
    """Set while hooks are attached with this module as the model."""
    stands_in_for: tuple[ForwardCounter, ...] = ()
    """The counters of models whose own forward is not called: calls of this part of them begin their steps."""
    replaced: Slot | None = None
    """A slot with several steps that a hook has replaced in the middle of compiled code, which goes on with it."""
    noted: CallState | None = None
    """Set by ``attach_everywhere`` in the first call of a module: it runs the slots before the call itself, so torch
    does not hand the state on."""
    covered = -1
    """Set by ``attach_everywhere``: up to which generation of process-wide hooks the module has them all."""

    def __init__(self, module: nn.Module) -> None:
        self.sit_on(module)
        self.key = _new_key(self)
        """By which compiled code finds the hooks."""
        self.receivers: dict[Any, Any] = {}
        """A cache of ``op_runtime``: what takes the summaries of the graphs whose first key is that of this module."""
        self._by_kind: dict[Kind, _Entries] = {}

    def sit_on(self, module: nn.Module) -> None:
        """Be the hooks of ``module``: at first, or of a shallow copy that has survived it."""
        self.module: Callable[[], nn.Module | None] = weakref.ref(module, functools.partial(_forget, weakref.ref(self)))
        """Return the module, unless it is gone."""
        if self.counter is not None:
            self.counter.model = weakref.ref(module)

    def hooks_of_kind(self, kind: Kind) -> _Entries:
        """Return the live hooks of one kind, in the order they run."""
        return self._by_kind.get(kind, ())

    def entries(self) -> Iterator[HookAtSite]:
        """Return every hook on the module."""
        for hooks in self._by_kind.values():
            yield from hooks

    def begin_forward(self, gradients: bool | None = None) -> None:
        """Begin a forward of each model that a call of this module stands for."""
        if self.counter is not None and self.around is None:
            self.counter.begin(gradients)
        for counter in self.stands_in_for:
            model = counter.model()
            if model is not None and not _torch.times_running(model):
                counter.begin_by_part()

    def slot_for(self, name: str, steps: str) -> Slot | None:
        """Return the slot of that name with those steps: the current one, or the one before it; None if neither has.

        ``op_runtime`` asks with the text that the graph was compiled with: ``steps`` are its letters and a "/".
        """
        module = self.module()
        slot = None if module is None else _CALL_ROWS[name].slot_on(module)
        for found in (slot, self.replaced):
            if found is not None and found.slot == name and found.recipe.startswith(steps):
                return found
        return None

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: HookAtSite) -> None:
        """Put a hook in its place."""
        self.keep_places()  # the counter that this module joins may have seen the hooks of others already
        kind = entry.attachment.kind
        self._by_kind[kind] = tuple(sorted((*self.hooks_of_kind(kind), entry), key=lambda each: each.rank))
        self._sync(kind)
        entry.counter.hooked.add(self)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; do nothing if it is off already."""
        kind = entry.attachment.kind
        if entry not in self.hooks_of_kind(kind):
            return
        self._by_kind[kind] = tuple(other for other in self._by_kind[kind] if other is not entry)
        self._sync(kind)
        if not any(other.counter is entry.counter for other in self.entries()):
            entry.counter.hooked.discard(self)

    def set_counter(self, counter: ForwardCounter | None) -> None:
        """Begin or end counting this module's forwards."""
        self.counter = counter
        self._sync(Kind.FORWARD_PRE)

    def set_stands_in(self, counter: ForwardCounter, *, wanted: bool) -> None:
        """Let calls of this module begin the steps of ``counter``, or not any more."""
        others = tuple(other for other in self.stands_in_for if other is not counter)
        self.stands_in_for = (*others, counter) if wanted else others
        self._sync(Kind.FORWARD_PRE)

    def set_around(self, around: Scope | None) -> None:
        """Enter ``around`` before each call from the next one on, and leave it after."""
        self.around = around
        self._sync(Kind.FORWARD_PRE)

    def keep_places(self) -> None:
        """Put our edits before, and our observers after, hooks that others have registered since."""
        module = self.module()
        if module is not None:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                if len(hooks) > 1:
                    _keep_places(hooks)

    def _sync(self, kind: Kind) -> None:
        """Put in place the slots that the hooks need, after a hook of ``kind`` has come or gone."""
        HookChanges.count += 1
        module = self.module()
        if module is None:
            return
        if kind in CALL_KINDS:
            self._sync_calls(module, kind)
            return
        self._put(module, _KIND_ROWS[kind], self.hooks_of_kind(kind))

    def _sync_calls(self, module: nn.Module, kind: Kind) -> None:
        """Put the slots around the calls of the module."""
        pre, post = self.hooks_of_kind(Kind.FORWARD_PRE), self.hooks_of_kind(Kind.FORWARD)
        if kind in GRADIENT_KINDS:
            self.set_gradient_hooks(*map(self.hooks_of_kind, GRADIENT_KINDS))
            is_own = not recompile_guard.is_forward_replaced(module)
            self.uses_input_once = is_own and type(module) in USE_INPUT_ONCE
        if self.has_gradients or self.plan:
            self._set_begins_late(module, has_observers=bool(pre) and pre[-1].attachment.options.observe)
            self.plan = plan_of(self)
        self._sync_guard(module, post)
        counts = (self.counter is not None and self.around is None) or self.stands_in_for
        # ``early`` is the plan of the slot before the call, which has nothing to do if the call begins late.
        plan, early = self.plan, "" if self.begins_late else self.plan
        first, last = _split(pre)
        self._put(module, FIRST_PRE, first, ticks="t" if counts else "")
        self._put(module, LAST_PRE, last, plan=early, with_kwargs=bool(early))
        first, last = _split(post)
        # If the call is cut short, always_call hooks get what the slot at the front of the queue has noted.
        self._put(module, FIRST_FORWARD, first, with_kwargs=self.guard is not None)
        # The slot before the call hands on what it has noted by the keyword arguments.
        self._put(module, LAST_FORWARD, last, plan=plan, with_kwargs=bool(early))
        in_runs = self.counter is not None and self.counter.in_runs
        is_hooked = bool(in_runs or self.stands_in_for or plan or self.around or pre or post)
        recompile_guard.set_own_forward(module, wanted=is_hooked)
        if isinstance(module, AttentionPart):
            edits = any(map(_is_traced, post))
            module.set_hooked(hooked=is_hooked, in_path=edits or self.has_gradients)

    def _sync_guard(self, module: nn.Module, forward: _Entries) -> None:
        """Wrap the whole call while there are hooks that run however it ends, or something around it."""
        if self.around is not None or any(entry.attachment.options.always_call for entry in forward):
            if self.guard is None:
                self.guard = module.__dict__[_torch.CALL_IMPL] = CallGuard(self, module)
                recompile_guard.hide_from_copies(module)
        elif self.guard is not None:
            if module.__dict__.get(_torch.CALL_IMPL) is self.guard:
                del module.__dict__[_torch.CALL_IMPL]
            self.guard = None

    def _set_begins_late(self, module: nn.Module, *, has_observers: bool) -> None:
        """Decide whether calls begin late for gradient hooks: no slot before the call notes where it begins.

        In compiled code each such slot is 14 guards more. The moment at which a call began tells a new output from an
        input that the module returns, or changes in place. Modules that do neither need no such moment, so they begin
        late. Not with a pre-hook of somebody else, though, which may attach a gradient hook to this very call: that
        begins with the next one.
        """
        is_alone = all(isinstance(hook, LastPreSlot) for hook in module._forward_pre_hooks.values())
        self.begins_late = self.observes_outputs and self.uses_input_once and not has_observers and is_alone
        if self.begins_late:
            self.entered = next_order()  # for a call under way when this ends: the hooks of now take part, no later one

    def _put(
        self,
        module: nn.Module,
        row: Row,
        entries: _Entries,
        *,
        plan: str = "",
        ticks: str = "",
        with_kwargs: bool = False,
    ) -> None:
        """Have one slot in a row while there are entries, or something else it is for; none otherwise."""
        before = row.slot_on(module)
        if entries or plan or ticks or with_kwargs:
            slot = row.make(self, entries, plan, ticks)
            with_kwargs = with_kwargs or any(entry.attachment.options.with_kwargs for entry in entries)
            _torch.put_hook(module, row.hooks, row.hook_id, slot, with_kwargs=with_kwargs)
            hooks = getattr(module, row.hooks)
            if before is None and len(hooks) > 1 and row.make.slot:
                _torch.place(hooks, row.hook_id, last=row.hook_id == LAST)
        elif before is not None:
            _take_off(module, row.hooks, row.hook_id)
        if before is not None and before.slot and len(before.steps) > 1 and _torch.in_compiled_code():
            self.replaced = before


def _take_off(module: nn.Module, attribute: str, hook_id: int) -> None:
    """Remove what is ours from one of torch's dictionaries.

    torch takes a snapshot of the forward and backward hooks it is about to run, but walks its state-dict hooks live:
    meanwhile something inert takes the place of ours, and goes when the next hook comes.
    """
    if "state_dict" in attribute and _torch.being_walked(getattr(module, attribute)):
        _torch.put_hook(module, attribute, hook_id, Inert())
        return
    _torch.drop_hook(module, attribute, hook_id)
    if attribute == "_backward_hooks" and not module._backward_hooks:
        setattr(module, _torch.FULL_BACKWARD_FLAG, None)  # torch leaves it set


def _keep_places(hooks: Any) -> None:
    """Put our slots first and last in one of torch's dictionaries; take `LOCK` only if one has to move.

    Slots that fire call this too.
    """
    for hook_id, end in ((FIRST, 0), (LAST, -1)):
        order = list(hooks)
        if hook_id in order and order[end] != hook_id:
            with LOCK:
                if hook_id in hooks:
                    _torch.place(hooks, hook_id, last=hook_id == LAST)


def _split(hooks: _Entries) -> tuple[_Entries, _Entries]:
    """Return the hooks for the front of the queue (edits) and for its end (observers); they are sorted so."""
    edits = tuple(entry for entry in hooks if not entry.attachment.options.observe)
    return edits, hooks[len(edits) :]


# -- the hooks of any module ---------------------------------------------------------------------------------------


def existing_hooks(module: nn.Module) -> ModuleHooks | None:
    """Return the hooks of a module, if it has any; a shallow copy shares those of the original."""
    for row in _ROWS:
        slot = row.slot_on(module)
        if slot is not None:
            return slot.module_hooks  # type: ignore[no-any-return]
    return None


def hooks_of_module(module: nn.Module, name: str = "") -> ModuleHooks:
    """Return the hooks of a module, made if it has none; ``name`` is for the error."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnhookableError(
            f"{repr(name) if name else type(module).__name__} is a ScriptModule: TorchScript does not run Python "
            "hooks. Attach to the module before it is scripted or traced, or leave it out (exclude=)."
        )
    hooks = existing_hooks(module)
    if hooks is None:
        if any(map(module.__dict__.get, _torch.HOOK_DICTS)):
            drop_inert(module)
        return ModuleHooks(module)
    if hooks.module() is None:
        hooks.sit_on(module)
    return hooks


def drop_inert(module: nn.Module) -> None:
    """Take off what does nothing: what is left of the hooks of the module that this one is a copy of."""
    inert = [(attribute, hook_id) for attribute, hook_id, hook in _torch.hooks_of(module) if isinstance(hook, Inert)]
    for attribute, hook_id in inert:
        _take_off(module, attribute, hook_id)
    if inert:
        recompile_guard.set_own_forward(module, wanted=False)


def _forget(hooks_ref: weakref.ref[ModuleHooks], _: Any, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Drop the hooks of a module that is gone; do nothing while the interpreter ends, which takes modules apart."""
    # ``is_ending`` is a default value because at the end of the process the names of this file may be gone already.
    hooks = None if is_ending() else hooks_ref()
    for entry in hooks.entries() if hooks is not None else ():
        entry.attachment.drop_entry(entry)


def add_entries(attachment: Attachment, model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> None:
    """Put an attachment on modules of a model; under LOCK."""
    if not chosen:
        return
    inner = model if WRAPPER_KEYS.isdisjoint(model._modules.keys()) else unwrap(model)
    counter = counter_of(inner, attachment.kind)
    counter.users[attachment] = attachment.counters[counter] = None  # as `ForwardCounter.serve` does, without the call
    for name, module in chosen:
        module_hooks = hooks_of_module(module, name)
        module_hooks.add(HookAtSite(attachment, name, module_hooks, counter))


# -- the forwards of a model ---------------------------------------------------------------------------------------


def counter_of(model: nn.Module, kind: Kind) -> ForwardCounter:
    """Return the counter of a model's forwards, made if need be; it has to `serve` a hook of that kind at once."""
    hooks = hooks_of_module(model)
    counter = hooks.counter or ForwardCounter(model)
    in_runs = counter.in_runs or kind not in STATE_KINDS
    if hooks.counter is None or in_runs is not counter.in_runs:
        counter.in_runs = in_runs
        hooks.set_counter(counter)
    return counter


def release_counters(attachment: Attachment) -> None:
    """End the service of the counters of an attachment that is off; the last one ends the counting."""
    for counter in list(attachment.counters):  # which shrink when a model is collected
        counter.users.pop(attachment, None)
        if counter.users:
            continue
        stand_in, model = counter.stand_in(), counter.model()
        if stand_in is not None:
            stand_in.set_stands_in(counter, wanted=False)
        hooks = None if model is None else existing_hooks(model)
        if hooks is not None:
            hooks.set_counter(None)


def _count_by_part(counter: ForwardCounter) -> None:
    """Let the outermost part of the model that runs now begin the steps of ``counter``, this call being the first.

    Called when a hook fires and no forward of its model has begun: Lightning calls ``training_step``, others call
    ``encode``; the modules inside are called, the model is not. Do nothing where the model itself is running, or no
    part of it is: a hook that came on in the middle of a forward has its first step with the next one. Takes `LOCK`,
    in a firing, where it has found such a part.
    """
    model = counter.model()
    if model is None:
        return
    own = {id(module) for _, module, _ in walk(model)}
    running = [module for module in _torch.running() if id(module) in own]
    if not running or any(module is model for module in running):
        return
    with LOCK:
        hooks = hooks_of_module(unwrap(running[-1]))
        hooks.set_stands_in(counter, wanted=True)
    counter.stand_in = weakref.ref(hooks)
    counter.begin_by_part()


ForwardCounter.on_uncalled = _count_by_part
