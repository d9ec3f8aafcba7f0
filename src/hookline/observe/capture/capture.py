"""Keep what flows through a model: outputs, inputs and gradients, by the names of the modules.

Users call `capture`, and so does `bisect` (debug/compare). It checks the options, puts the hooks of a `CaptureRecorder`
on modules, and returns a `Cache` over it, which is also the handle of the hooks: they come off with ``remove()``, or at
the end of a ``with`` block, and what it holds stays. Comparisons (debug/compare/values.py) read a `Cache`, and so do
the edits ``swap`` and ``mean_ablate``. The hooks are observers: they must return None, and run after all edits. A new
option of what is kept belongs to `ValueStore`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn

from hookline.errors import CaptureError, NoMatchError, OptionError
from hookline.messages import counted, nearest_names, size_text
from hookline.observe.capture.calls import (
    NO_NUMBERS,
    Captured,
    CapturedCall,
    CaptureRecorder,
    CaptureStopped,
    ValueStore,
    bytes_of,
)
from hookline.observe.index import TokenAxes, parse_index
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions, close_context, open_context
from hookline.sites.kinds import Kind
from hookline.sites.receipt import likely_cause
from hookline.sites.roles import IN_BLOCKS, Layers, modules_in_role, role_target, with_role
from hookline.sites.signature import HookTraits
from hookline.sites.targets import Named, check_model, choose
from hookline.sites.wrappers import submodule
from hookline.tables import OFF, ON, THE_MODEL, ShownAsTable, Table
from hookline.tree import main_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.hook_types import Scope, Target
    from hookline.sites.hook_at_site import Attachment, HookAtSite

_MAX_ROWS: Final = 60
_MAX_MAPS: Final = 12
"""Heat maps that a notebook shows at once: 10 kB each at most."""
_ENDED_EARLY: Final = "stop=True ended the block here: nothing behind the model's call in it was run"
_MORE_TENSORS: Final = "+1: .output has one more tensor; the one whose shape is shown is .tensor"


class Cache(ShownAsTable, Mapping[str, Captured]):
    """Captured modules by name, in the order in which they were first captured; prints as a table.

    Recipe: ``with hookline.capture(model, "layers.#") as cache: model(x)``, then ``cache["layers.3"].output``, or
    ``for name, captured in cache.items(): ...``; by role and block ``cache["resid", 3]``, and of all blocks
    ``cache.stack("resid")``; to a file, ``torch.save({name: cache[name].output for name in cache}, path)``.

    A module that was to be captured and never was called is no key, but can be asked for: its ``.output`` says why.
    """

    def __init__(self, recorder: CaptureRecorder, model: Callable[[], nn.Module | None] = lambda: None) -> None:
        self._recorder = recorder
        self._model = model
        self._calls = recorder.calls
        self._is_closed = False
        """Whether its hooks are off, or never were on."""
        self.ended_early = False
        """Whether ``stop=True`` has ended the block: what came after the model's call in it was not run."""
        self.handles: dict[Kind, HookHandle] = {}
        """The hooks, one attachment for each kind."""
        self.reasons: dict[str, Callable[[], str]] = {}
        """For each module that is to be captured, a function that says why it was not."""

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
        elif name not in self._calls and name not in self.reasons:
            name = self._resolve(name)
        return Captured(name, tuple(self._calls.get(name, ())), self._why_none)

    def stack(self, role: str) -> Tensor:
        """Return the main tensors of a role, block by block, as one: (blocks, …); each was captured once.

        Recipe: ``cache.stack("resid")[:, 0, -1]`` is the last token after each block. Row k is block k: it raises
        where a block was not captured, or has nothing in that role, and where they are not of one shape.
        """
        model = self._live_model()
        names = [name for name, _ in modules_in_role(model, role_target(role)) if name in self._calls]
        if not names:
            raise NoMatchError(f"Nothing with the role {role!r} was captured: capture(model, role={role!r}).")
        blocks = len(modules_in_role(model, role_target("resid"))) if role in IN_BLOCKS else 1
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

    def _live_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise CaptureError("Roles are read off the model, and this cache has none: it is gone.")
        return model

    def _in_role(self, place: tuple[str, int]) -> str:
        """Return the name of what has a role in a block."""
        if len(place) != 2 or not isinstance(place[0], str) or not isinstance(place[1], Integral):
            raise NoMatchError(f"A cache is read by name, or by role and block: cache['resid', 3]; got {place!r}.")
        named = modules_in_role(self._live_model(), role_target(*place))
        if not named or (named[0][0] not in self._calls and named[0][0] not in self.reasons):
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
            return Table(title=f"Cache of {counted(len(self.reasons), 'module')}, none captured yet")
        rows = [_cells(*item) for item in calls.items()]
        num_calls = counted(sum(map(len, calls.values())), "call")
        foot = [f"{counted(len(calls), 'module')}, {num_calls}, {size_text(self.bytes)}"]
        foot += [_ENDED_EARLY] if self.ended_early else []
        foot += [_MORE_TENSORS] if any(" +" in row[1] for row in rows) else []
        header = ("name", "output", "dtype", "calls", "size")
        return Table(header, rows, numbers=(3, 4), foot=foot, most=_MAX_ROWS)

    def _repr_html_(self) -> str:
        """Return the table and, folded, heat maps of the first modules; to draw these waits for their device."""
        maps = "".join(calls[0]._repr_html_() for calls in [*self._calls.values()][:_MAX_MAPS])
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

    # -- inside ------------------------------------------------------------------------------------------

    def _why_none(self, name: str) -> str:
        return self.reasons[name]()

    def _resolve(self, name: str) -> str:
        """Return the name under which a module was captured: shared modules have several, wrappers add prefixes."""
        model = self._model()
        known = {**self.reasons, **self._calls}
        if model is not None and isinstance(name, str):
            try:
                meant = submodule(model, name)
            except AttributeError:
                meant = None
            for other in known if meant is not None else ():
                if ":" not in other and submodule(model, other) is meant:
                    return other
        near = nearest_names(str(name), known)
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

_OPTIONS: Final = AttachOptions(observe=True, name="capture")
_WITH_KWARGS: Final = AttachOptions(observe=True, with_kwargs=True, name="capture")
# The letters are those of ``Attachment.reads``: a (arguments), k (keyword arguments), o (output).
_READS_OUTPUT: Final = HookTraits(wants_site=False, may_edit=False, reads="o")
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
    store = ValueStore(part, detach, None if device is None else torch.device(device), clone)
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


def _begin(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Stand for a pre-hook while it is attached: each module then gets its own, ``recorder.begin_hook(entry)``."""


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """Stand for a forward hook while it is attached: each module then gets its own, ``recorder.end_hook(entry)``."""


def _attach(cache: Cache, recorder: CaptureRecorder, model: nn.Module, chosen: list[Named]) -> None:
    """Attach once for each kind of hook; each module gets hooks of its own, with its name."""

    def attach(
        kind: Kind, hook: Any, options: AttachOptions = _OPTIONS, traits: HookTraits | None = None
    ) -> Attachment:
        attachment = new_attachment(hook, kind, options, traits=traits)
        attachment.context = recorder.scope if kind is not Kind.FORWARD else None  # `end_hook` asks for the scope
        cache.handles[kind] = attach_to_modules(attachment, model, chosen)
        return attachment

    if recorder.opens_calls:
        reads = HookTraits(wants_site=False, may_edit=False, reads="ak" if recorder.takes_inputs else "")
        for entry in attach(Kind.FORWARD_PRE, _begin, _WITH_KWARGS, reads).entries:
            entry.hook = recorder.begin_hook(entry)
    if recorder.takes_grads:
        attach(Kind.BACKWARD_PRE, recorder.take_grads)
    for entry in attach(Kind.FORWARD, _end, traits=_READS_OUTPUT).entries:
        entry.hook = recorder.end_hook(entry)
        cache.reasons[entry.name] = functools.partial(_reason, entry, recorder)


def _reason(entry: HookAtSite, recorder: CaptureRecorder) -> str:
    """Return why nothing was captured."""
    attachment = entry.attachment
    if entry.name in recorder.left_out:
        return NO_NUMBERS
    if entry.counter.step <= entry.step_at_attach and not entry.fired:
        return "the model has not run since" if not attachment.removed else "the model did not run meanwhile"
    if entry.fired:
        return (
            "no call was made in the thread, or asyncio task, that opened the capture; scope='process' captures "
            "those of others too, and cache.clear() forgets"
        )
    return likely_cause(entry, attachment)
