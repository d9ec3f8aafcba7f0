"""Store what a captured module took and returned, and hand it out again, checked.

The recorder of a capture makes a `CapturedCall` for each call and stores values in it by a `ValueStore`, which cuts,
casts, moves and copies tensors as asked. Reading a value checks that no tensor shared with the model was changed since.

    >>> import torch
    >>> ValueStore(index=(slice(None), -1)).keep({"x": torch.arange(6).reshape(2, 3)}, "output", "a").value
    {'x': tensor([2, 5])}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hookline.errors import CaptureError
from hookline.messages import type_name
from hookline.observe.heat_map import heat_maps_of
from hookline.observe.index import index_text
from hookline.sites import _torch
from hookline.tables import THE_MODEL, line
from hookline.tree import leaves, main_tensor, map_tensors, tensors_of

__all__ = ["Captured", "CapturedCall", "NoNumbers", "StoredValue", "ValueStore", "bytes_of"]

_MAX_TENSORS: Final = 4
"""Tensors of one output that a notebook shows."""
_MAX_CALLS: Final = 12
"""Calls of one module that a notebook shows: 10 kB each at most."""


class NoNumbers(Exception):
    """A tensor holds no numbers: inside of a transform, or while a model is traced or exported."""


class StoredValue(NamedTuple):
    """A value as it was stored."""

    value: Any
    """The structure as the module had it; lists and dicts are copies, since the model may go on filling its own."""
    borrowed: tuple[tuple[Tensor, int], ...] = ()
    """Tensors whose memory is shared with the model, each with the version it had."""

    def changed(self) -> list[Tensor]:
        """Return the borrowed tensors that were changed in place since."""
        return [tensor for tensor, version in self.borrowed if tensor._version != version]


class ValueStore:
    """Prepares every tensor for the cache by the options of ``capture``."""

    def __init__(
        self,
        *,
        index: Any = None,
        detach: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        clone: bool = False,
    ) -> None:
        self._index = index
        self._detach = detach
        self._dtype = dtype
        self._device = device
        self._clone = clone
        self._is_plain = not (detach or clone) and index is None and dtype is None and device is None
        """Whether values are kept unchanged."""
        self._streams: set[Any] = set()
        """CUDA streams that may still be copying into pinned memory."""

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
        cuts = self._index is not None and tensor.dim() > 0
        piece = self._cut(tensor, what) if cuts else tensor
        if self._detach:
            piece = piece.detach()
        if self._dtype is not None and piece.is_floating_point():
            piece = piece.to(self._dtype)
        kept = self._move(piece)
        # A copy of a part frees the whole. Inference mode keeps no count of changes: only a copy is safe from them.
        needs_own = self._clone or cuts or tensor.is_inference()
        return kept.clone() if needs_own and _shares_memory(kept, tensor) else kept

    def _cut(self, tensor: Tensor, what: str) -> Tensor:
        """Return the part that ``index=`` asks for."""
        index = self._index
        try:
            piece = index(tensor) if callable(index) else tensor[index]
        except Exception as error:
            raise CaptureError(
                f"index={_shown(index)} does not fit the {what}, of shape {tuple(tensor.shape)} ({error}). Give one "
                "that fits every tensor of every target, narrow the target, or give a function that looks at the shape."
            ) from error
        if not isinstance(piece, Tensor):
            raise CaptureError(
                f"index={_shown(index)} made a {type(piece).__name__} of the {what}, of shape {tuple(tensor.shape)}; "
                "a function given as index= takes a tensor and returns one."
            )
        return piece

    def _move(self, piece: Tensor) -> Tensor:
        device = self._device
        if device is None or piece.device == device:
            return piece
        if not (piece.is_cuda and device.type == "cpu"):
            return piece.to(device)
        # Into pinned memory the copy runs while the host goes on. It is in the stream that made the tensor, so whatever
        # is done to that memory afterwards, a reuse by the allocator included, comes after it.
        pinned = torch.empty_like(piece, device=device, pin_memory=True, requires_grad=False)
        pinned.copy_(piece, non_blocking=True)
        self._streams.add(torch.cuda.current_stream(piece.device))
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


class CapturedCall:
    """One call of a captured module.

    Recipe: ``cache["layers.3"].calls[0].output``, and ``.tensor``, ``.inputs``, ``.kwargs``, ``.grad``, ``.step``,
    ``.call``.
    """

    __slots__ = ("_wait", "call", "gradients", "had_graph", "is_left_out", "is_mixed", "name", "step", "values")

    def __init__(
        self, name: str, step: int, call: int, *, grads: bool = False, wait: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        """The name of the module."""
        self.step = step
        """The number of the forward of the model since the capture began: of ``generate``, of the token."""
        self.call = call
        """The number of the call of the module within that forward."""
        self.values: dict[str, StoredValue] = {}
        """What is stored, unchecked: "output", and "inputs" and "kwargs" if they were asked for."""
        self.gradients: list[StoredValue] | None = [] if grads else None
        """Those of the output, unchecked, one for each backward pass; None if they were not asked for."""
        self.had_graph = torch.is_grad_enabled()
        """Whether gradients were on when it began."""
        self.is_mixed = False
        """Whether a gradient may be that of another call."""
        self.is_left_out = False
        """Whether it is not to be kept when it ends."""
        self._wait = wait
        """Waits for copies to the host that are under way."""

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
        found: tuple[Any, ...] = self._read(self._taken("inputs"), "input")
        return found

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        found: dict[str, Any] = self._read(self._taken("kwargs"), "input")
        return found

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
                "belongs to which call cannot be told. Use use_reentrant=False."
            )
        return tuple(self._read(grad, "gradient") for grad in self.gradients)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that it holds, unchecked."""
        for kept in (*self.values.values(), *(self.gradients or ())):
            yield from tensors_of(kept.value)

    def to_dict(self) -> dict[str, Any]:
        """Return all that it holds, checked; `of_dict` makes a call of it again."""
        found: dict[str, Any] = {"step": self.step, "call": self.call, "output": self.output}
        if "inputs" in self.values:
            found |= {"inputs": self.inputs, "kwargs": self.kwargs}
        return found if self.gradients is None else found | {"grads": self.grads}

    @classmethod
    def of_dict(cls, name: str, found: dict[str, Any]) -> CapturedCall:
        """Return a call that holds what `to_dict` has given."""
        call = cls(name, found["step"], found["call"], grads="grads" in found)
        call.values = {key: StoredValue(found[key]) for key in ("output", "inputs", "kwargs") if key in found}
        if call.gradients is not None:
            call.gradients += map(StoredValue, found["grads"])
        return call

    def _taken(self, key: str) -> StoredValue:
        if key not in self.values:
            raise CaptureError(f"The inputs of {self.name!r} were not captured: hl.capture(..., inputs=True).")
        return self.values[key]

    def _read(self, kept: StoredValue, what: str) -> Any:
        self._wait()
        for tensor in kept.changed():
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
    """Return the tensors of a value that are drawn, each with where it is; attention has its weights as the second."""
    found = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)][:_MAX_TENSORS]
    return [("" if len(found) == 1 else f"[{path}]", leaf) for path, leaf in found]


class Captured:
    """The calls that were captured of one module.

    Recipe: ``cache["layers.3"].output``, or ``.calls[i].output`` where the module was called more than once.
    ``.tensor`` is the main tensor of an output that is a tuple or dict, as that of attention. ``.inputs`` and
    ``.kwargs`` want ``inputs=True``, ``.grad`` wants ``grads=True``.
    """

    __slots__ = ("_why_none", "calls", "name")

    def __init__(self, name: str, calls: tuple[CapturedCall, ...], why_none: Callable[[str], str]) -> None:
        self.name = name
        """The name of the module."""
        self.calls = calls
        """Its calls, in the order they ended."""
        self._why_none = why_none

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
        return f"<Captured {self.name!r}, {len(self.calls)} call{'' if len(self.calls) == 1 else 's'}>"

    def _repr_html_(self) -> str:
        more = line(f"… and {len(self.calls) - _MAX_CALLS:,} more calls") if len(self.calls) > _MAX_CALLS else ""
        return line(repr(self)) + "".join(call._repr_html_() for call in self.calls[:_MAX_CALLS]) + more
