"""Keep what flows through a model: outputs, inputs and gradients, by the names of the modules.

Users call `capture`, and so does bisect_runs.py of ``debug.compare``. It checks the options, puts the hooks of a
`CaptureRecorder` on modules, and returns a `Cache` over it, which is also the handle of the hooks: they come off with
``remove()``, or at the end of a ``with`` block, and what it holds stays. The recorder makes a `CapturedCall` for each
call, and stores values in it by a `ValueStore`, which cuts, moves and copies tensors as asked. Properties of a call
(``.output``) check that no tensor shared with the model was changed since; ``values`` and `tensors` do not.

Edits (`_tensors_of` and `_tensor_of` of patching.py) and comparisons (`_of_cache` of debug/compare/values.py) read
`Cache`, `Captured` and `CapturedCall` by the names of their attributes: change a name at all ends together. A name with
":" is a place inside of attention (sites/roles.py), which is no module.

The hooks are observers: they must return None, and run after all edits. A call is kept when its forward ends. With
inputs or gradients it is opened before the forward, which may change its inputs in place. A gradient finds its call by
step and number, so calls must be counted as gradient hooks count them. An entry here is the hook of one module
(`HookAtSite`), an attachment what all hooks of one kind have in common (`Attachment`): see sites/hook_at_site.py.

A new option is an argument of `capture` with a line in its docstring. One about what is kept of a tensor is then a
field of `ValueStore`, where `_is_plain` has to know of it; `capture` makes the store. One about which calls are kept is
a field of `CaptureRecorder`. Add it to ``OBSERVERS`` of tests/observe/test_observers_inert.py.

    >>> import torch
    >>> ValueStore(index=(slice(None), -1)).keep({"x": torch.arange(6).reshape(2, 3)}, "output", "a").value
    {'x': tensor([2, 5])}
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from hookline.errors import CaptureError, NoMatchError, OptionError
from hookline.messages import counted, nearest_names, size_text, type_name
from hookline.observe.heat_map import heat_maps_of
from hookline.observe.host_values import sent_to_host
from hookline.observe.index import GIVE_ROWS, TokenAxes, index_text, parse_index
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions, close_context, open_context, open_contexts
from hookline.sites.kinds import Kind
from hookline.sites.receipt import likely_cause
from hookline.sites.roles import IN_BLOCKS, Layers, modules_in_role, role_target, with_role
from hookline.sites.signature import HookTraits
from hookline.sites.targets import Named, check_model, choose
from hookline.sites.wrappers import submodule
from hookline.tables import OFF, ON, THE_MODEL, ShownAsTable, Table, line
from hookline.tree import leaves, main_of, main_tensor, map_tensors, tensors_of

if TYPE_CHECKING:
    from hookline.hook_types import Grads, Hook, Scope, Target
    from hookline.sites.hook_at_site import Attachment, HookAtSite, Site

_MAX_TENSORS: Final = 4
"""Tensors of one output that a notebook shows."""
_MAX_CALLS: Final = 12
"""Calls whose heat maps a notebook shows at once: 10 kB each at most."""


class NoNumbers(Exception):
    """A tensor holds no numbers: inside of a transform, or while a model is traced or exported."""


class StoredValue(NamedTuple):
    """A value as it was stored."""

    value: Any
    """The structure as the module had it; lists and dicts are copies, since the model may go on filling its own."""
    borrowed: tuple[tuple[Tensor, int], ...] = ()
    """Tensors whose memory is shared with the model, each with the version it had."""


@dataclass(eq=False)
class ValueStore:
    """Prepares every tensor for the cache by the options of ``capture``."""

    index: Any = None
    detach: bool = False
    device: torch.device | None = None
    clone: bool = False
    _streams: set[Any] = field(default_factory=set)
    """CUDA streams that may still be copying into pinned memory."""

    def __post_init__(self) -> None:
        self._is_plain = not (self.detach or self.clone or self.index is not None or self.device)
        """Whether values are kept unchanged."""

    def keep(self, value: Any, side: str, name: str) -> StoredValue:
        """Return a value of any structure as it is to be kept: that ``side`` of the module ``name``.

        Raise `NoNumbers`, and `CaptureError` for what does not fit.
        """
        if self._is_plain and type(value) is Tensor and not _torch.is_wrapped(value) and not value.is_inference():
            return StoredValue(value, ((value, value._version),))
        borrowed: list[tuple[Tensor, int]] = []

        def keep_one(path: str, tensor: Tensor) -> Tensor:
            kept = self._keep_tensor(tensor, f"{side} of {name!r}")
            if _shares_memory(kept, tensor):
                borrowed.append((kept, kept._version))
            return kept

        return StoredValue(map_tensors(value, keep_one), tuple(borrowed))

    def wait_for_copies(self) -> None:
        """Wait for copies that are under way; after it every kept tensor can be read."""
        while self._streams:
            self._streams.pop().synchronize()

    def _keep_tensor(self, tensor: Tensor, what: str) -> Tensor:
        if not _torch.has_numbers(tensor):
            raise NoNumbers
        cuts = self.index is not None and tensor.dim() > 0
        piece = self._cut(tensor, what) if cuts else tensor
        if self.detach:
            piece = piece.detach()
        kept = self._move(piece)
        # A copy of a part lets the whole tensor be freed. Inference mode counts no changes: only a copy is safe from
        # them.
        needs_own = self.clone or cuts or tensor.is_inference()
        return kept.clone() if needs_own and _shares_memory(kept, tensor) else kept

    def _cut(self, tensor: Tensor, what: str) -> Tensor:
        """Return the part that ``index=`` asks for."""
        index = self.index
        try:
            piece: Tensor = index(tensor) if callable(index) else tensor[index]
        except Exception as error:
            raise CaptureError(
                f"index={_shown(index)} does not fit the {what}, of shape {tuple(tensor.shape)} ({error}). Give one "
                "that fits every tensor of every target, narrow the target, or give a function that looks at the shape."
            ) from error
        if not isinstance(piece, Tensor):
            raise CaptureError(f"index={_shown(index)} made {type_name(piece)} of the {what}: it has to make a tensor.")
        return piece

    def _move(self, piece: Tensor) -> Tensor:
        device = self.device
        if device is None or piece.device == device:
            return piece
        if not (piece.is_cuda and device.type == "cpu"):
            return piece.to(device)
        self._streams.add(torch.cuda.current_stream(piece.device))
        pinned: Tensor = sent_to_host(piece)
        return pinned


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return address and size of a tensor's memory; address 0 for kinds of tensor that have none of their own."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, tensor.numel() * tensor.element_size()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return how much memory some tensors take together; what several of them share counts once."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        address, nbytes = _memory_of(tensor)
        sizes[(str(tensor.device), address) if address else ("tensor", id(tensor))] = nbytes
    return sum(sizes.values())


def _shares_memory(piece: Tensor, tensor: Tensor) -> bool:
    return piece is tensor or _memory_of(piece)[0] in (0, _memory_of(tensor)[0])


def _shown(index: Any) -> str:
    return str(getattr(index, "__qualname__", index)) if callable(index) else index_text(index)


# -- calls -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False, slots=True)
class CapturedCall:
    """One call of a captured module.

    Recipe: ``cache["layers.3"].calls[0].output``, and ``.tensor``, ``.inputs``, ``.kwargs``, ``.grad``, ``.step``,
    ``.call``.
    """

    name: str
    """The name of the module."""
    step: int
    """The number of the forward of the model since the capture began: of ``generate``, of the token."""
    call: int
    """The number of the call of the module within that forward."""
    gradients: list[StoredValue] | None = None
    """The gradients of the output, unchecked, one for each backward pass; None if they were not asked for."""
    _wait: Callable[[], None] = lambda: None
    """Waits for copies to the host that are under way."""
    values: dict[str, StoredValue] = field(default_factory=dict)
    """What is stored, unchecked: "output", and "inputs" and "kwargs" if they were asked for."""
    had_graph: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients were on when it began."""
    is_mixed: bool = False
    """Whether a gradient may belong to another call: see ``_mark_mixed``."""
    is_left_out: bool = False
    """Whether the call has a tensor without numbers, and so is not kept."""

    @property
    def output(self) -> Any:
        """The output of the module, in its structure."""
        return self._read(self.values["output"], "output")

    @property
    def tensor(self) -> Tensor:
        """The main tensor of the output, the one that ``patch`` edits: of a tuple or dict the first of real numbers."""
        found = main_tensor(self.output)
        if found is None:
            raise CaptureError(
                f"The output of {self.name!r} is {type_name(self.output)} with no tensor in it: .output."
            )
        return found

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as the module got them."""
        return tuple(self._given("inputs"))

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return dict(self._given("kwargs"))

    @property
    def grad(self) -> Any:
        """The gradient of the output, in its structure; None if there was no backward pass."""
        grads = self.grads
        if len(grads) > 1:
            raise CaptureError(
                f"{len(grads)} backward passes came through {self.name!r}; read them one by one: .calls[i].grads[j]."
            )
        return grads[0] if grads else None

    @property
    def grads(self) -> tuple[Any, ...]:
        """The gradients of the output, one for each backward pass."""
        if self.gradients is None:
            raise CaptureError(f"The gradients of {self.name!r} were not captured: hl.capture(..., grads=True).")
        if self.is_mixed:
            raise CaptureError(
                f"Activation checkpointing with use_reentrant=True repeats calls of {self.name!r}, and which gradient "
                "belongs to which call cannot be determined. Use use_reentrant=False."
            )
        return tuple(self._read(grad, "gradient") for grad in self.gradients)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that it holds, unchecked."""
        for kept in (*self.values.values(), *(self.gradients or ())):
            yield from tensors_of(kept.value)

    def _given(self, key: str) -> Any:
        if key not in self.values:
            raise CaptureError(f"The inputs of {self.name!r} were not captured: hl.capture(..., inputs=True).")
        return self._read(self.values[key], "input")

    def _read(self, kept: StoredValue, what: str) -> Any:
        self._wait()
        for tensor, version in kept.borrowed:
            if tensor._version == version:
                continue
            as_by = ", as nn.ReLU(inplace=True) does" if what != "gradient" else ""
            raise CaptureError(
                f"The {what} of {self.name!r}, shape {tuple(tensor.shape)}, was changed in place after it was "
                f"captured{as_by}: what is there now is not what flowed. Capture with clone=True."
            )
        return kept.value

    def __repr__(self) -> str:
        return f"<CapturedCall {self.name!r}, step {self.step}, call {self.call}>"

    def _repr_html_(self) -> str:
        """Return heat maps of the first tensors of the output and its gradients; waits for their device."""
        name = f"{self.name or THE_MODEL}, step {self.step}, call {self.call}"
        try:
            values = {f"{name}: output": self.output}
            values |= {f"{name}: gradient": grad for grad in (self.grads if self.gradients is not None else ())}
        except CaptureError as error:
            return line(str(error))
        found = {f"{what}{path}": x for what, value in values.items() for path, x in _first_tensors(value)}
        return heat_maps_of(found)


def _first_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the first tensors of a value, to be drawn, with their places; attention has its weights as the second."""
    found = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)][:_MAX_TENSORS]
    return [("" if len(found) == 1 else f"[{path}]", leaf) for path, leaf in found]


@dataclass(eq=False, repr=False, slots=True)
class Captured:
    """The calls that were captured of one module.

    Recipe: ``cache["layers.3"].output``, or ``.calls[i].output`` where the module was called more than once.
    ``.tensor`` is the main tensor of an output that is a tuple or dict, as that of attention. ``.inputs`` and
    ``.kwargs`` want ``inputs=True``, ``.grad`` wants ``grads=True``.
    """

    _why_none: Callable[[str], str]
    """A method of the cache. It is the first field: to copy or pickle this begins with the cache, whose error says what
    to do instead."""
    name: str
    """The name of the module."""
    calls: tuple[CapturedCall, ...]
    """Its calls, in the order they ended."""

    @property
    def output(self) -> Any:
        """The output of the module, in its structure."""
        return self._only("output").output

    @property
    def tensor(self) -> Tensor:
        """The main tensor of the output, the one that ``patch`` edits: of a tuple or dict the first of real numbers."""
        return self._only("tensor").tensor

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as the module got them."""
        return self._only("inputs").inputs

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self._only("kwargs").kwargs

    @property
    def grad(self) -> Any:
        """The gradient of the output, in its structure; None if there was none."""
        return self._only("grad").grad

    def _only(self, attribute: str) -> CapturedCall:
        calls = self.calls
        if len(calls) == 1:
            return calls[0]
        if not calls:
            raise CaptureError(f"Nothing was captured of {self.name!r}: {self._why_none(self.name)}.")
        steps = len({call.step for call in calls})
        forwards = f" in {steps} forwards of the model" if steps > 1 else ""
        raise CaptureError(
            f"{self.name!r} was called {len(calls)} times{forwards}, so .{attribute} does not say which is meant; use "
            f".calls[i].{attribute} with i from 0 to {len(calls) - 1}, or cache.clear() before each forward."
        )

    def __repr__(self) -> str:
        return f"<Captured {self.name!r}, {counted(len(self.calls), 'call')}>"

    def _repr_html_(self) -> str:
        more = line(f"… and {len(self.calls) - _MAX_CALLS:,} more calls") if len(self.calls) > _MAX_CALLS else ""
        return line(repr(self)) + "".join(call._repr_html_() for call in self.calls[:_MAX_CALLS]) + more


# -- recording -------------------------------------------------------------------------------------------------------

NO_NUMBERS: Final = (
    "its calls were inside of a transform (torch.vmap, torch.func.grad) or of torch.export, where tensors have no "
    "numbers of their own that could be kept; run the model outside of it"
)


class CaptureStopped(BaseException):
    """Ends a forward whose last target is captured. Not an `Exception`, since a model may catch those."""

    def __init__(self, owner: object) -> None:
        super().__init__("hookline.capture(..., stop=True) has captured its last target; this ends its `with` block.")
        self.owner = owner


class _OpenCalls(threading.local):
    """The calls that are under way in this thread."""

    def __init__(self) -> None:
        self.by_module: dict[str, list[CapturedCall]] = defaultdict(list)
        """The innermost call last; a call that raised is dropped at the next one."""


@dataclass(eq=False)
class CaptureRecorder:
    """Records calls, in the order they end."""

    store: ValueStore
    takes_inputs: bool = False
    takes_grads: bool = False
    axes: TokenAxes | None = None
    scope: int | None = None
    """The number of the context whose calls are kept; None for those of the whole process."""
    stops_after: frozenset[str] = frozenset()
    """The modules after whose calls the forward is ended; none for a forward that goes on."""
    can_stop: bool = False
    """Whether there is a ``with`` block for `CaptureStopped` to leave."""
    calls: dict[str, list[CapturedCall]] = field(default_factory=dict)
    """The calls that have ended, by the names of the modules; shared by all threads."""
    left_out: set[str] = field(default_factory=set)
    """The modules of which a call was not kept, as it had no numbers."""
    _seen: set[str] = field(default_factory=set)
    """The modules of ``stops_after`` that were called in this forward."""
    _open: _OpenCalls = field(default_factory=_OpenCalls)
    _awaiting: dict[tuple[str, int, int], CapturedCall] = field(default_factory=dict)
    """The calls that gradients can come to, by name, step, and number among those that began with gradients on, as
    gradient hooks count."""

    @property
    def opens_calls(self) -> bool:
        """Whether calls are opened before the forward, and not just made at its end."""
        return self.takes_inputs or self.takes_grads

    def clear(self) -> None:
        """Drop all calls."""
        self.calls.clear()
        self.left_out.clear()
        self._seen.clear()
        self._awaiting.clear()

    def release(self) -> dict[str, list[CapturedCall]]:
        """Return the calls, once the hooks are off, and drop all references to them.

        Graph nodes hold the hook of gradients, which holds this recorder; calls hold outputs, which hold graph nodes.
        The garbage collector does not see that circle, since a part of it is in C++, so it has to be cut here.
        """
        self.store.wait_for_copies()
        calls, self.calls, self._awaiting = self.calls, {}, {}
        self._open = _OpenCalls()  # that of every thread
        return calls

    # -- hooks -------------------------------------------------------------------------------------------

    def begin_hook(self, entry: HookAtSite) -> Hook:
        """Return the forward pre-hook of one module, which opens a call."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _torch.in_recomputation():
                self._mark_mixed(entry.name)
                return
            call = self._new_call(entry)
            if self.takes_inputs:
                self._keep(call, "inputs", "input", tuple(args))
                self._keep(call, "kwargs", "input", dict(kwargs))
            under_way = self._open.by_module[entry.name]
            if under_way:
                del under_way[_alive(module, under_way) - 1 :]
            under_way.append(call)
            # A call that is left out is counted all the same: gradients know theirs by number.
            if self.takes_grads and call.had_graph:
                self._awaiting[entry.name, *entry.counter.moment((entry, "grad"))] = call

        return begin

    def end_hook(self, entry: HookAtSite) -> Hook:
        """Return the forward hook of one module, which keeps the call."""
        opens, scope = self.opens_calls, self.scope

        def end(module: nn.Module, args: Any, output: Any) -> None:
            # The attachment does not ask: a call that it keeps from us would look like no call at all in `_why_none`.
            if scope is not None and scope not in open_contexts():
                return
            if _torch.in_recomputation():
                return  # it was kept the first time
            call = self._opened(entry, module) if opens else self._new_call(entry)
            if call is not None:
                self._end(call, output)

        return end

    def take_grads(self, module: nn.Module, grads: Grads, *, site: Site) -> None:
        """Take the gradients of a module's output; one hook for all modules."""
        call = self._awaiting.get((site.name, site.step, site.call))
        if call is None or call.is_left_out or call.gradients is None:
            return
        by_path = dict(zip(site.outputs, grads, strict=True))
        shaped = map_tensors(call.values["output"].value, lambda path, _: by_path.get(path), lambda leaf: None)
        with suppress(NoNumbers):
            call.gradients.append(self.store.keep(shaped, "gradient", site.name))

    # -- calls -------------------------------------------------------------------------------------------

    def _new_call(self, entry: HookAtSite) -> CapturedCall:
        moment = entry.counter.moment(entry)
        return CapturedCall(entry.name, *moment, [] if self.takes_grads else None, self.store.wait_for_copies)

    def _opened(self, entry: HookAtSite, module: nn.Module) -> CapturedCall | None:
        """Return the call that ends now; None if it began before the capture."""
        under_way = self._open.by_module[entry.name]
        if len(under_way) > 1:
            del under_way[_alive(module, under_way) :]
        return under_way.pop() if under_way else None

    def _mark_mixed(self, name: str) -> None:
        """Mark the calls of a module that is run again, if the first time there was no graph.

        Checkpointing with use_reentrant=True does that: the gradients belong to the repetition, whose calls are counted
        from 0 again, so a gradient could find the wrong call.
        """
        calls = self.calls.get(name, ()) if self.takes_grads and torch.is_grad_enabled() else ()
        if not all(call.had_graph for call in calls):
            for call in calls:
                call.is_mixed = True

    def _end(self, call: CapturedCall, output: Any) -> None:
        name = call.name
        main = None if self.axes is None or call.is_left_out else main_tensor(output)
        if self.axes is not None and main is not None and (fault := self.axes.fault(name, main)):
            shape = tuple(main.shape)
            raise CaptureError(f"index= names axes, but the output of {name!r}, of shape {shape}, {fault}. {GIVE_ROWS}")
        self._keep(call, "output", "output", output)
        if call.is_left_out:
            return
        self.calls.setdefault(name, []).append(call)
        if name in self.stops_after:
            self._stop_after(name)

    def _keep(self, call: CapturedCall, key: str, side: str, value: Any) -> None:
        """Store a value, unless the call is left out."""
        if call.is_left_out:
            return
        try:
            call.values[key] = self.store.keep(value, side, call.name)
        except NoNumbers:
            call.is_left_out = True
            self.left_out.add(call.name)

    def _stop_after(self, name: str) -> None:
        """End the forward if this was the last module that it waits for."""
        self._seen.add(name)
        if self._seen < self.stops_after:  # a proper subset: some have not been called
            return
        self._seen.clear()
        if not self.can_stop:
            raise OptionError("stop=True ends the forward by leaving a `with` block: with hl.capture(..., stop=True):")
        raise CaptureStopped(self)


def _alive(module: nn.Module, begun: list[CapturedCall]) -> int:
    """Return how many calls of a module are running, with the one that begins or ends; those that raised are not.

    Entries of ``begun`` beyond that number are of calls that raised. In compiled code torch tells of none, and none
    raises: there all of ``begun`` count.
    """
    return _torch.times_running(module) or len(begun) + 1


# -- the cache -----------------------------------------------------------------------------------------------------

_MAX_ROWS: Final = 60
_ENDED_EARLY: Final = "stop=True ended the block here: nothing behind the model's call in it was run"
_MORE_TENSORS: Final = "+1: .output has one more tensor; the one whose shape is shown is .tensor"


class Cache(ShownAsTable, Mapping[str, Captured]):
    """Captured modules by name, in the order in which they were first captured; prints as a table.

    Recipe: ``with hookline.capture(model, "layers.#") as cache: model(x)``, then ``cache["layers.3"].output``, or
    ``for name, captured in cache.items(): ...``; by role and block ``cache["resid", 3]``, and of all blocks
    ``cache.stack("resid")``; to a file, ``torch.save({name: cache[name].output for name in cache}, path)``.

    A module that was to be captured and never was called is no key, but can be asked for: its ``.output`` says why.
    """

    def __init__(self, recorder: CaptureRecorder, model: weakref.ref[nn.Module]) -> None:
        self._recorder = recorder
        self._model = model
        self._calls = recorder.calls
        self._is_closed = False
        """Whether its hooks are off, or never were on."""
        self.ended_early = False
        """Whether ``stop=True`` has ended the block: what came after the model's call in it was not run."""
        self.handles: dict[Kind, HookHandle] = {}
        """The hooks, one attachment for each kind."""
        self.entries: dict[str, HookAtSite] = {}
        """The forward hook of each module that is to be captured, by the names under which calls are kept."""

    # -- what was captured -------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that were captured, in the order in which they first were."""
        return tuple(self._calls)

    @property
    def bytes(self) -> int:
        """The memory that the captured tensors keep; what several of them share counts once."""
        return bytes_of(tensor for calls in [*self._calls.values()] for call in calls for tensor in call.tensors())

    def __getitem__(self, name: str | tuple[str, int]) -> Captured:
        if isinstance(name, tuple):
            name = self._in_role(name)
        elif name not in self.entries:
            name = self._resolve(name)
        return Captured(self._why_none, name, tuple(self._calls.get(name, ())))

    def stack(self, role: str) -> Tensor:
        """Return the main tensors of a role, block by block, as one: (blocks, …); each was captured once.

        Recipe: ``cache.stack("resid")[:, 0, -1]`` is the last token after each block. Row k is block k: it raises
        where a block was not captured, or has nothing in that role, and where they are not of one shape.
        """
        names = [name for name, _ in self._with_role(role) if name in self._calls]
        if not names:
            raise NoMatchError(f"Nothing with the role {role!r} was captured: capture(model, role={role!r}).")
        blocks = len(self._with_role("resid")) if role in IN_BLOCKS else 1
        if len(names) < blocks:
            raise NoMatchError(
                f"{role!r} was captured in {len(names)} of {blocks} blocks. Stack what you mean: "
                f"torch.stack([cache[{role!r}, k].tensor for k in …])."
            )
        rows = [self[name].tensor for name in names]
        if len({row.shape for row in rows}) > 1:
            shapes = ", ".join(str(tuple(shape)) for shape in dict.fromkeys(row.shape for row in rows))
            raise CaptureError(f"{role!r} has several shapes, as an encoder and a decoder have: {shapes}; stack parts.")
        return torch.stack(rows)

    def _with_role(self, role: str, block: int | None = None) -> list[Named]:
        """Return the modules of the model with a role, in all blocks or one."""
        model = self._model()
        if model is None:
            raise CaptureError("Roles are read off the model, and this cache has none: it is gone.")
        return modules_in_role(model, role_target(role, block))

    def _in_role(self, place: tuple[str, int]) -> str:
        """Return the name of what has a role in a block."""
        if len(place) != 2 or not isinstance(place[0], str) or not isinstance(place[1], Integral):
            raise NoMatchError(f"A cache is read by name, or by role and block: cache['resid', 3]; got {place!r}.")
        named = self._with_role(*place)
        if not named or named[0][0] not in self.entries:
            what = f"{named[0][0]!r}, the {place[0]} of block {place[1]}," if named else f"Block {place[1]}"
            raise NoMatchError(f"{what} was not captured: capture(model, role={place[0]!r}).")
        return named[0][0]

    def __contains__(self, name: object) -> bool:
        try:
            return (self._in_role(name) if isinstance(name, tuple) else name) in self._calls
        except NoMatchError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._calls)

    def _table(self) -> Table:
        calls = dict(self._calls)
        if not calls:
            return Table(title=f"Cache of {counted(len(self.entries), 'module')}, none captured yet")
        rows = [_cells(*item) for item in calls.items()]
        num_calls = counted(sum(map(len, calls.values())), "call")
        foot = [f"{counted(len(calls), 'module')}, {num_calls}, {size_text(self.bytes)}"]
        foot += [_ENDED_EARLY] if self.ended_early else []
        foot += [_MORE_TENSORS] if any(" +" in row[1] for row in rows) else []
        header = ("name", "output", "dtype", "calls", "size")
        return Table(header, rows, numbers=(3, 4), foot=foot, most=_MAX_ROWS)

    def _repr_html_(self) -> str:
        """Return the table and, folded, heat maps of the first modules; to draw these waits for their device."""
        maps = "".join(calls[0]._repr_html_() for calls in [*self._calls.values()][:_MAX_CALLS])
        folded = f"<details><summary>heat maps</summary>{maps}</details>" if maps else ""
        return super()._repr_html_() + folded

    def _state(self) -> str:
        """Return whether it captures, and how to have it stop."""
        return OFF if self._is_closed else ON

    # -- coming off, starting over, keeping --------------------------------------------------------------

    def remove(self, *, quiet: bool = False) -> None:
        """Take the hooks off; what was captured stays. Warn, unless ``quiet``, of modules that were never called."""
        if self._is_closed:
            return
        silent, self._is_closed = False, True
        try:
            for kind, handle in reversed(self.handles.items()):  # forward, gradients, what opens calls
                handle.remove(quiet=quiet or silent or kind is Kind.FORWARD_PRE)
                # One warning for what was not called: it has no gradient either.
                silent = len(self.handles) > 1 and bool(handle.report().silent)
        finally:
            if self._recorder.scope is not None:
                close_context(self._recorder.scope)
            self._calls = self._recorder.release()

    def clear(self) -> None:
        """Forget what was captured; the hooks stay on."""
        self._recorder.clear()
        self._calls.clear()

    def __enter__(self) -> Self:
        if self._is_closed:
            raise CaptureError(
                "This cache is closed, and would capture nothing: its hooks came off at the end of its `with` block. "
                "What it holds stays readable; for more, open another hl.capture(...)."
            )
        self._recorder.can_stop = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self._recorder.can_stop = False
        self.remove(quiet=error is not None)
        self.ended_early = isinstance(error, CaptureStopped) and error.owner is self._recorder
        return self.ended_early

    def __reduce__(self) -> tuple[Any, ...]:
        raise CaptureError(
            "A cache holds hooks on the model, and cannot be copied or pickled. Keep the tensors: "
            "torch.save({name: cache[name].output for name in cache}, path)."
        )

    # -- inside ------------------------------------------------------------------------------------------

    def _why_none(self, name: str) -> str:
        """Return why nothing was captured of a module."""
        entry = self.entries[name]
        attachment = entry.attachment
        if name in self._recorder.left_out:
            return NO_NUMBERS
        if entry.counter.step <= entry.step_at_attach and not entry.fired:
            return "the model has not run since" if not attachment.removed else "the model did not run meanwhile"
        if entry.fired:
            return (
                "no call was made in the thread, or asyncio task, that opened the capture; scope='process' captures "
                "those of others too, and cache.clear() forgets"
            )
        return likely_cause(entry, attachment)

    def _resolve(self, name: str) -> str:
        """Return the name under which a module was captured: shared modules have several, wrappers add prefixes."""
        model = self._model()
        if model is not None and isinstance(name, str):
            with suppress(AttributeError):
                meant = submodule(model, name)
                for other in self.entries:
                    if ":" not in other and submodule(model, other) is meant:
                        return other
        near = nearest_names(str(name), self.entries)
        hint = f"nearest: {', '.join(map(repr, near))}" if near else "nothing was"
        raise NoMatchError(f"{name!r} was not captured; {hint}. All names: cache.names.")


def _cells(name: str, calls: list[CapturedCall]) -> tuple[str, ...]:
    output = calls[0].values["output"].value
    tensors = tensors_of(output)
    main = main_of(tensors)
    others = f" +{len(tensors) - 1}" if len(tensors) > 1 else ""
    shape = type(output).__name__ if main is None else f"{tuple(main.shape)}{others}"
    dtype = "–" if main is None else str(main.dtype).removeprefix("torch.")
    size = bytes_of(tensor for call in calls for tensor in call.tensors())
    return name or THE_MODEL, shape, dtype, str(len(calls)), size_text(size)


# -- the verb --------------------------------------------------------------------------------------------------------

_NEVER_CALLED: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def capture(
    model: nn.Module,
    targets: Target = None,
    *,
    role: str | None = None,
    layer: Layers = None,
    inputs: bool = False,
    grads: bool = False,
    clone: bool = False,
    detach: bool = False,
    device: str | torch.device | None = None,
    index: Any = None,
    stop: bool = False,
    exclude: Target = None,
    scope: Scope = "context",
    strict: bool = True,
) -> Cache:
    """Keep what modules of a model return, take in, and get back as gradients.

    Recipe::

        with hookline.capture(model, "layers.#", grads=True) as cache:
            model(x).sum().backward()
        cache["layers.3"].output  # .grad, and with inputs=True .inputs and .kwargs
        cache["layers.3"].calls[1].output  # of a module that is called several times

    Values are what everything downstream sees, after the edits of other hooks. They are kept as the module returned
    them, tensors by reference and with their graph: ``cache["layers.3"].output.sum().backward()`` works, and while the
    cache lives, so does the graph. Where such a tensor is changed in place afterwards, as
    ``nn.ReLU(inplace=True)`` does, reading it raises and asks for ``clone=True`` (changes that torch does not count,
    through ``.data`` or NumPy, go unnoticed); in inference mode, where torch counts none, tensors are copied. Compiled
    code shows copies without a graph. Every call is kept until ``cache.clear()``; one that activation checkpointing
    only repeats is not kept again, nor is one in a transform of ``torch.func`` or in ``torch.export``, whose tensors
    have no numbers of their own. Objects that are neither tensors nor containers, such as a key-value cache, are kept
    by reference as they are.

    Args:
        model: The model; names are relative to it.
        targets: Which modules, as in ``attach``.
        role: In place of ``targets``, the role of the modules in a language model: ``"resid"``, ``"attn"``, ``"mlp"``,
            ``"embed"``, ``"final_norm"``, ``"unembed"`` or ``"router"``; inside of attention ``"q"``, ``"k"``,
            ``"v"``, ``"pattern"``, ``"z"`` and ``"attn_out"``, by head.
        layer: With ``role``, the number of a block, several, or a slice; -1 is the last.
        inputs: Keep the arguments of each call too, as they were when it began.
        grads: Keep the gradients of the outputs too; they have the structure of the output, None where none came.
        clone: Keep copies, which no in-place operation reaches.
        detach: Keep tensors without their graph.
        device: Move what is kept there. From CUDA to ``"cpu"`` the copies go into pinned memory while the run goes on;
            who reads a value, or leaves the block, waits for them.
        index: Keep a part of each tensor that has dimensions: what goes between the brackets of ``tensor[…]``, or a
            function from tensor to tensor (``torch.Tensor.bfloat16``). ``(slice(None), -1)`` is the last token of
            (B, T, D). The rest is let go.
        stop: End the forward as soon as every target was captured once; the rest of the ``with`` block is skipped. It
            ends by a ``BaseException``, which passes a model that catches every ``Exception``.
        exclude: Modules to leave out, in the same grammar as ``targets``.
        scope: ``"context"``: capture the calls of this thread, or asyncio task, alone; ``"process"``: all calls.
        strict: Raise if nothing matches; with False, warn and return a cache that stays empty.

    Raises:
        NoMatchError: (a KeyError) naming the nearest modules.
        OptionError: for an option that makes no sense, before anything is attached.
        CaptureError: (a RuntimeError) when a value is read that is not there, or not what it was, and, inside of the
            forward, for an ``index`` that does not fit.
    """
    check_model(model, targets)
    if stop and grads:
        raise OptionError(
            "stop=True ends the forward before there is a loss, so no gradient would come: drop stop= or grads=."
        )
    if scope not in ("context", "process"):
        raise OptionError(f"scope= is 'context' or 'process', got {scope!r}.")
    part = index if index is None or callable(index) else parse_index(index, new_dimensions=True)
    axes = TokenAxes.checking(model, part) if isinstance(part, tuple) else None
    store = ValueStore(part, detach, None if device is None else _parse_device(device), clone)
    recorder = CaptureRecorder(store, inputs, grads, axes)
    chosen = choose(model, with_role(targets, role, layer=layer), exclude, strict=strict)
    if stop:
        recorder.stops_after = frozenset(name for name, module in chosen if not isinstance(module, _NEVER_CALLED))
    recorder.scope = open_context() if scope == "context" else None
    cache = Cache(recorder, weakref.ref(model))
    try:
        _attach(cache, recorder, model, chosen)
    except BaseException:
        cache.remove(quiet=True)
        raise
    return cache


def _parse_device(device: Any) -> torch.device:
    """Return a device that this process has; raise for others."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise OptionError(f"device= is a device such as 'cpu' or 'cuda:0', got {device!r} ({first}).") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device={device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices.")
    return found


def _stand_in(*args: Any) -> None:
    """Stand for a hook while it is attached: each module then gets its own, from a method of the recorder."""


def _attach(cache: Cache, recorder: CaptureRecorder, model: nn.Module, chosen: list[Named]) -> None:
    """Attach once for each kind of hook; each module gets hooks of its own, with its name."""

    def attach(kind: Kind, hook: Any, reads: str | None = None) -> Attachment:
        # The letters are those of ``Attachment.reads`` (sites/hook_at_site.py): a for arguments, k for keyword
        # arguments, o for the output.
        options = AttachOptions(observe=True, with_kwargs=kind is Kind.FORWARD_PRE, name="capture")
        traits = None if reads is None else HookTraits(wants_site=False, may_edit=False, reads=reads)
        attachment = new_attachment(hook, kind, options, traits=traits)
        attachment.context = recorder.scope if kind is not Kind.FORWARD else None  # `end_hook` asks for the scope
        cache.handles[kind] = attach_to_modules(attachment, model, chosen)
        return attachment

    if recorder.opens_calls:
        for entry in attach(Kind.FORWARD_PRE, _stand_in, "ak" if recorder.takes_inputs else "").entries:
            entry.hook = recorder.begin_hook(entry)
    if recorder.takes_grads:
        attach(Kind.BACKWARD_PRE, recorder.take_grads)
    for entry in attach(Kind.FORWARD, _stand_in, "o").entries:
        entry.hook = recorder.end_hook(entry)
        cache.entries[entry.name] = entry
