"""One captured call of one module: what went in, what came out, the gradients that came back.

Filled by the ``recorder``, kept by ``cache``. Reading checks that nobody has changed a borrowed tensor since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hookline.errors import CaptureError
from hookline.observe.capture.stored_value import Kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["NOT_ASKED", "CapturedCall"]

NOT_ASKED: Final = Kept("not asked for")
"""Stands for inputs where ``inputs=`` was not given."""


def _nothing() -> None:
    return None


class CapturedCall:
    """One call of a captured module.

    Recipe: ``cache["layers.3"].calls[0].output``, and ``.inputs``, ``.kwargs``, ``.grad``, ``.step``, ``.call``.
    """

    __slots__ = (
        "_args",
        "_grads",
        "_kwargs",
        "_output",
        "_settle",
        "_takes_grads",
        "call",
        "is_left_out",
        "mixed",
        "name",
        "step",
    )

    def __init__(
        self,
        name: str,
        step: int,
        call: int,
        output: Kept = NOT_ASKED,
        *,
        args: Kept = NOT_ASKED,
        kwargs: Kept = NOT_ASKED,
        takes_grads: bool = False,
        settle: Callable[[], None] = _nothing,
    ) -> None:
        self.name = name
        """The name of the module."""
        self.step = step
        """Which forward of the model since the capture began: of ``generate``, which token."""
        self.call = call
        """Which call of the module within that forward."""
        self.mixed = False
        """Whether a gradient came that may be of another call."""
        self.is_left_out = False
        """Whether it is followed to its end, and then not kept."""
        self._output = output
        self._args = args
        self._kwargs = kwargs
        self._takes_grads = takes_grads
        self._grads: tuple[Kept, ...] = ()
        self._settle = settle

    @property
    def output(self) -> Any:
        """What the module returned, in the structure it returned it in."""
        return self._open(self._output, "output")

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
        """The gradient of the output, in its structure; None if no backward pass came by."""
        grads = self.grads
        if len(grads) > 1:
            raise CaptureError(
                f"{len(grads)} backward passes came through {self.name!r}; read them one by one: .calls[i].grads[j]."
            )
        return grads[0] if grads else None

    @property
    def grads(self) -> tuple[Any, ...]:
        """The gradients of the output, one for each backward pass that came by."""
        if not self._takes_grads:
            raise CaptureError(f"The gradients of {self.name!r} were not captured: hl.capture(..., grads=True).")
        if self.mixed:
            raise CaptureError(
                f"Activation checkpointing with use_reentrant=True has repeated several calls of {self.name!r}, and "
                "which gradient belongs to which cannot be told. Use use_reentrant=False, or call backward after each "
                "forward, with one call of the module in it."
            )
        return tuple(self._open(grad, "gradient") for grad in self._grads)

    def kept(self) -> dict[str, Kept | tuple[Kept, ...]]:
        """Everything there is, unopened: for saving, and for counting bytes."""
        found: dict[str, Kept | tuple[Kept, ...]] = {"output": self._output, "grads": self._grads}
        if self._args is not NOT_ASKED:
            found |= {"inputs": self._args, "kwargs": self._kwargs}
        return found

    @property
    def takes_grads(self) -> bool:
        """Whether gradients were asked for."""
        return self._takes_grads

    @property
    def kept_output(self) -> Kept:
        """The output, unopened."""
        return self._output

    @property
    def has_grads(self) -> bool:
        """Whether a gradient has come."""
        return bool(self._grads) or self.mixed

    def add_inputs(self, args: Kept, kwargs: Kept) -> None:
        """The call has begun."""
        self._args, self._kwargs = args, kwargs

    def add_output(self, output: Kept) -> None:
        """The call has ended."""
        self._output = output

    def add_grad(self, grad: Kept) -> None:
        """A backward pass came by."""
        self._grads += (grad,)

    def copied(self, copy_of: Callable[[Kept], Kept]) -> CapturedCall:
        """The same call with copies of what it holds."""
        self._settle()
        twin = CapturedCall(self.name, self.step, self.call, copy_of(self._output), takes_grads=self._takes_grads)
        twin.mixed = self.mixed
        if self._args is not NOT_ASKED:
            twin.add_inputs(copy_of(self._args), copy_of(self._kwargs))
        for grad in self._grads:
            twin.add_grad(copy_of(grad))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_with, (self.name, self.step, self.call, self.mixed, self._takes_grads, self.kept())

    def _asked(self, kept: Kept) -> Kept:
        if kept is NOT_ASKED:
            raise CaptureError(f"The inputs of {self.name!r} were not captured: hl.capture(..., inputs=True).")
        return kept

    def _open(self, kept: Kept, what: str) -> Any:
        self._settle()
        if any(tensor._version != version for tensor, version in kept.borrowed):
            raise _changed(self.name, what, [tensor for tensor, version in kept.borrowed if tensor._version != version])
        return kept.value

    def __repr__(self) -> str:
        return f"<CapturedCall {self.name!r}, step {self.step}, call {self.call}>"


def _call_with(name: str, step: int, call: int, mixed: bool, takes_grads: bool, kept: dict[str, Any]) -> CapturedCall:
    """A call out of a pickle: NOT_ASKED is known by being the one, so it stays at home."""
    found = CapturedCall(name, step, call, kept["output"], takes_grads=takes_grads)
    found.mixed = mixed
    if "inputs" in kept:
        found.add_inputs(kept["inputs"], kept["kwargs"])
    for grad in kept["grads"]:
        found.add_grad(grad)
    return found


def _changed(name: str, what: str, tensors: list[Tensor]) -> CaptureError:
    as_by = ", as nn.ReLU(inplace=True) does" if what != "gradient" else ""
    return CaptureError(
        f"The {what} of {name!r}, shape {tuple(tensors[0].shape)}, was changed in place after it was captured{as_by}: "
        "what is there now is not what flowed. Capture with clone=True."
    )
