"""Hold one captured call of one module: its inputs, its output, and the gradients of that.

The recorder of a capture fills it, and the cache keeps it. Reading a value checks that no tensor that is
shared with the model was changed since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.errors import CaptureError
from hookline.messages import type_name
from hookline.notebook_html import line
from hookline.observe.capture.stored_value import StoredValue
from hookline.observe.heat_map import heat_maps_of
from hookline.tables import THE_MODEL
from hookline.tree import leaves, main_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOT_ASKED", "CapturedCall"]

NOT_ASKED: Final = StoredValue("not asked for")
"""Stands for inputs if ``inputs=`` was not given."""
_MAX_TENSORS: Final = 4
"""Tensors of one output that a notebook shows."""


class CapturedCall:
    """One call of a captured module.

    Recipe: ``cache["layers.3"].calls[0].output``, and ``.tensor``, ``.inputs``, ``.kwargs``, ``.grad``, ``.step``,
    ``.call``.
    """

    __slots__ = (
        "_args",
        "_grads",
        "_kwargs",
        "_output",
        "_wait",
        "call",
        "is_left_out",
        "mixed",
        "name",
        "step",
        "takes_grads",
    )

    def __init__(
        self,
        name: str,
        step: int,
        call: int,
        output: StoredValue = NOT_ASKED,
        *,
        takes_grads: bool = False,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        """The name of the module."""
        self.step = step
        """The number of the forward of the model since the capture began: of ``generate``, of the token."""
        self.call = call
        """The number of the call of the module within that forward."""
        self.mixed = False
        """Whether a gradient may be that of another call."""
        self.is_left_out = False
        """Whether it is not to be kept when it ends."""
        self._output = output
        self._args = self._kwargs = NOT_ASKED
        self._grads: tuple[StoredValue, ...] = ()
        self.takes_grads = takes_grads
        """Whether gradients were asked for."""
        self._wait = wait

    @property
    def output(self) -> Any:
        """The output of the module, in its structure."""
        return self._open(self._output, "output")

    @property
    def tensor(self) -> Tensor:
        """The main tensor of the output, the one that ``patch`` edits: of a tuple or dict the first of real numbers."""
        found = main_tensor(self.output)
        if found is None:
            kind = type_name(self.output)
            raise CaptureError(f"The output of {self.name!r} is {kind} with no tensor in it; .output has all of it.")
        return found

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as the module got them."""
        found: tuple[Any, ...] = self._open(self._asked(self._args), "input")
        return found

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        found: dict[str, Any] = self._open(self._asked(self._kwargs), "input")
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
        if not self.takes_grads:
            raise CaptureError(f"The gradients of {self.name!r} were not captured: hl.capture(..., grads=True).")
        if self.mixed:
            raise CaptureError(
                f"Activation checkpointing with use_reentrant=True has repeated several calls of {self.name!r}, and "
                "which gradient belongs to which cannot be told. Use use_reentrant=False, or call backward after each "
                "forward, with one call of the module in it."
            )
        return tuple(self._open(grad, "gradient") for grad in self._grads)

    def kept(self) -> dict[str, StoredValue | tuple[StoredValue, ...]]:
        """Return everything it holds, unchecked: for copies, and for counting bytes."""
        found: dict[str, StoredValue | tuple[StoredValue, ...]] = {"output": self._output, "grads": self._grads}
        if self._args is not NOT_ASKED:
            found |= {"inputs": self._args, "kwargs": self._kwargs}
        return found

    @property
    def kept_output(self) -> StoredValue:
        """The output, unchecked."""
        return self._output

    @property
    def has_grads(self) -> bool:
        """Whether there is a gradient."""
        return bool(self._grads) or self.mixed

    def add_inputs(self, args: StoredValue, kwargs: StoredValue) -> None:
        """Set the inputs, when the call begins."""
        self._args, self._kwargs = args, kwargs

    def add_output(self, output: StoredValue) -> None:
        """Set the output, when the call ends."""
        self._output = output

    def add_grad(self, grad: StoredValue) -> None:
        """Add the gradient of one backward pass."""
        self._grads += (grad,)

    def copied(self, copy_of: Callable[[StoredValue], StoredValue]) -> CapturedCall:
        """Return the same call with copies of what it holds."""
        if self._wait is not None:
            self._wait()
        kept = {key: copy_of(value) if isinstance(value, StoredValue) else tuple(map(copy_of, value))
                for key, value in self.kept().items()}  # fmt: skip
        return _call_with(self.name, self.step, self.call, self.mixed, self.takes_grads, kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_with, (self.name, self.step, self.call, self.mixed, self.takes_grads, self.kept())

    def _asked(self, kept: StoredValue) -> StoredValue:
        if kept is NOT_ASKED:
            raise CaptureError(f"The inputs of {self.name!r} were not captured: hl.capture(..., inputs=True).")
        return kept

    def _open(self, kept: StoredValue, what: str) -> Any:
        if self._wait is not None:
            self._wait()
        for tensor, version in kept.borrowed:
            if tensor._version != version:
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
            values |= {f"{name}: gradient": grad for grad in (self.grads if self.takes_grads else ())}
        except CaptureError as error:
            return line(str(error))
        found = {f"{what}{path}": x for what, value in values.items() for path, x in _first_tensors(value)}
        return heat_maps_of(found)


def _first_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a value that are drawn, each with where it is; attention has its weights as the second."""
    found = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)][:_MAX_TENSORS]
    return [("" if len(found) == 1 else f"[{path}]", leaf) for path, leaf in found]


def _call_with(name: str, step: int, call: int, mixed: bool, takes_grads: bool, kept: dict[str, Any]) -> CapturedCall:
    """Return a call with what `CapturedCall.kept` gave; NOT_ASKED is compared by ``is``, so no pickle holds it."""
    found = CapturedCall(name, step, call, kept["output"], takes_grads=takes_grads)
    found.mixed = mixed
    if "inputs" in kept:
        found.add_inputs(kept["inputs"], kept["kwargs"])
    for grad in kept["grads"]:
        found.add_grad(grad)
    return found
