"""Run a step at the level of operators, and find the one that made the first NaN or infinity.

`BadOperationFinder` runs the step inside an `OperatorRun`. Every operator is asked whether its inputs and its result
are finite. A result that is not has an origin: the operator that made it from finite inputs, however many have passed
it on since. Only an origin that reaches the loss, a gradient, a parameter or what a module returns is reported: an
infinity that a mask puts in and a softmax takes out is no fault.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hookline.debug.first_bad.bad_operation import BadOperation, as_float64, stored_numbers, summarize_tensor
from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules
from hookline.tree import tensors_of

UNFILLED: Final = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
)
"""Operators whose results hold whatever was in that memory before."""
_OVERWRITES: Final = frozenset(
    ("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "_foreach_copy_")
)
"""Operators that do not read the tensor that they write to."""
_CASTS: Final = frozenset(("_to_copy", "copy_", "_foreach_copy_"))


@dataclass(eq=False)
class _Origin:
    """An operator whose result was the first that was not finite."""

    number: int
    operation: BadOperation
    parents: list[_Origin] = field(default_factory=list)
    """Origins of the infinities that it made NaN of."""
    is_at_fault: bool = False
    """Whether a number that was given is no mask: plus infinity is among it."""
    has_left: bool = False
    """Whether a module has returned it."""

    def root(self) -> _Origin:
        """Return what is to blame: of NaN made of infinities, the operator that made these, unless they were given.

        An infinity that was given, and has left its module, is to blame itself unless it may be that of a mask.
        """
        made = [parent.root() for parent in self.parents if not parent.operation.given]
        found = made or [parent for parent in self.parents if parent.is_to_blame]
        return min(found, key=lambda each: each.number) if found else self

    @property
    def is_to_blame(self) -> bool:
        """Whether no other operator is, though this one may have been given the number."""
        return not self.operation.given or (self.has_left and self.is_at_fault)


class OperatorRun(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Look at every operator of the block; then `first` says which made the first number that was not finite."""

    def __init__(self, model: nn.Module, run_by: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._run_by = run_by
        self._names = {id(module): name for name, module in clean_modules(model)}
        self._parameters = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._running: list[str] = []
        self._made: dict[int, tuple[str, OperatorPlace]] = {}
        """The operator that made the graph node of that number, and its place."""
        self._handles: list[Any] = []
        self._known = {_key(tensor): name for name, tensor in _named_tensors(model)}
        self._origins: dict[int, _Origin] = {}
        """By the storage of a tensor that is not finite."""
        self._at_modules: list[_Origin] = []
        self._at_end: list[_Origin] = []
        self._in_backward: list[_Origin] = []
        self._is_looking = False
        self.begins_bad = any(_is_bad(parameter.detach()) for parameter in model.parameters())
        """Whether a parameter was not finite already when the block began."""
        self.num_operators = 0
        """How many operators ran."""

    def __enter__(self) -> OperatorRun:
        # Hooks on all modules: the second run is eager, and hooks on the model's own would make its code compile anew.
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def note_end(self, result: Any) -> None:
        """Look at what the step leaves behind: its result, gradients, parameters and buffers; in the block."""
        left = [*tensors_in(result), *(tensor for _, tensor in _named_tensors(self._model))]
        left += [p.grad for p in self._model.parameters() if p.grad is not None]
        self._at_end += self._looked_at(left)

    @property
    def first(self) -> BadOperation | None:
        """The operator to blame; one that was only given such a number if there is no other; None if all was well."""
        for reached in (self._at_end, self._at_modules):
            roots = sorted({origin.root() for origin in reached}, key=lambda each: each.number)
            made = [root for root in roots if root.is_to_blame]
            if made or (roots and reached is self._at_modules) or (roots and not self._at_modules):
                return (made or roots)[0].operation
        # A loop that skips a step with bad gradients leaves none of them behind.
        return self._in_backward[0].root().operation if self._in_backward else None

    # -- at each operator --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_looking:
            return func(*args, **kwargs)
        name, number = operator_name(func), self.num_operators
        self.num_operators += 1
        place = self._place_of(str(func))
        inputs = list(_inputs(func, name, args, kwargs))
        bad = [tensor for _, tensor in inputs if _is_bad(tensor)]
        has_nan = any(_has_nan(tensor) for tensor in bad)
        writes = func._schema.is_mutable
        if writes and not bad:  # they are gone afterwards
            inputs = [(key, tensor.clone()) for key, tensor in inputs]
        result = func(*args, **kwargs)
        if name in UNFILLED:
            for tensor in tensors_in(result):  # memory that was freed has no origin any more
                self._origins.pop(_key(tensor), None)
            return result
        both = itertools.chain(tensors_in(result), _written(func, args, kwargs) if writes else ())
        outputs = list({id(tensor): tensor for tensor in both}.values())
        spoiled = [tensor for tensor in outputs if _is_bad(tensor)]
        if spoiled:
            parents = self._origins_of(bad)
            call = _Call(func, name, args, kwargs, number, place, inputs)
            origin = self._judge(call, spoiled, parents, has_nan=has_nan)
            for tensor in spoiled:
                self._origins[_key(tensor)] = origin
        kept = {_key(tensor) for tensor in itertools.chain(spoiled, bad)}
        for tensor in outputs:
            if _key(tensor) not in kept:
                self._origins.pop(_key(tensor), None)
        return result

    def _judge(self, call: _Call, spoiled: list[Tensor], parents: list[_Origin], *, has_nan: bool) -> _Origin:
        """Return the origin of what an operator returned: the operator itself, or where its inputs come from."""
        makes_nan = any(_has_nan(tensor) for tensor in spoiled)
        if parents and not (makes_nan and not has_nan):
            return min(parents, key=lambda each: (bool(each.operation.given), each.number))
        given = "" if parents or not call.has_bad_number() else "a number that it was called with is not finite"
        operation = call.operation(spoiled, makes_nan=makes_nan, given=given)
        origin = _Origin(call.number, operation, parents, is_at_fault=bool(given) and any(map(_has_plus, spoiled)))
        if call.place.where == "backward" and not given:
            self._in_backward.append(origin)
        return origin

    def _origins_of(self, tensors: list[Tensor]) -> list[_Origin]:
        found: list[_Origin] = []
        for tensor in tensors:
            if _is_bad(tensor):
                key = _key(tensor)
                if key not in self._origins:
                    self._origins[key] = self._from_outside(tensor)
                found.append(self._origins[key])
        return list(dict.fromkeys(found))

    def _from_outside(self, tensor: Tensor) -> _Origin:
        name = self._known.get(_key(tensor))
        given = "an input, a constant, or memory that nothing has filled"
        if name is not None:
            given = f"{name!r} was not finite when the step began"
        what = "NaN" if _has_nan(tensor) else "Inf"
        place, number = self._place_of(""), self.num_operators
        operation = BadOperation(
            "the first operator that reads it", what, place.where, place.module, "", "", place.source, number,
            (summarize_tensor("input", tensor),), (), given,
        )  # fmt: skip
        return _Origin(number, operation, is_at_fault=what == "Inf" and _has_plus(tensor))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note origins of what a module returns."""
        if self._running:
            found = self._looked_at(list(tensors_in(output)))
            for origin in found:
                origin.has_left = True
            self._at_modules += found
            self._running.pop()

    def _looked_at(self, tensors: list[Tensor]) -> list[_Origin]:
        """Return the origins of tensors, without counting the operators that looking takes."""
        self._is_looking = True
        try:
            return self._origins_of(tensors)
        finally:
            self._is_looking = False

    # -- where an operator runs --------------------------------------------------------------------------------

    def _place_of(self, operator: str) -> OperatorPlace:
        """Return where the operator is called that runs now, and note it for the backward of its node."""
        node = None if _torch.graph_task_id() == -1 or _torch.in_recomputation() else _torch.current_node()
        if node is not None:
            return self._of_node(node)
        line, in_optimizer = _user_line(self._run_by)
        module = self._running[-1] if self._running else None
        where = "forward" if module is not None else "optimizer" if in_optimizer else "outside of the model"
        place = OperatorPlace(where, module, line=line)
        # The node of an operator is made before the operator is called; later ones without a node change nothing.
        self._made.setdefault(_torch.sequence_number() - 1, (operator, place))
        return place

    def _of_node(self, node: Any) -> OperatorPlace:
        name = node.name().rpartition("::")[2]
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if leaf is not None:
            return OperatorPlace("backward", self._parameters.get(id(leaf), "").rpartition(".")[0] or None, name)
        operator, made = self._made.get(_torch.sequence_number_of(node), ("", None))
        module, line = (None, None) if made is None else (made.module, made.line)
        return OperatorPlace("backward", module, name, operator, line)


@dataclass
class _Call:
    """One call of an operator."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    number: int
    place: OperatorPlace
    inputs: list[tuple[str, Tensor]]
    """As they were before the call."""

    def has_bad_number(self) -> bool:
        """Return whether a plain number among the arguments is not finite."""
        numbers = [*self.args, *self.kwargs.values()]
        return any(isinstance(each, float) and not math.isfinite(each) for each in numbers)

    def operation(self, spoiled: list[Tensor], *, makes_nan: bool, given: str) -> BadOperation:
        """Return the report about this call."""
        inputs = [summarize_tensor(*each) for each in self.inputs]
        outputs = [summarize_tensor("output", tensor) for tensor in spoiled]
        what = "NaN" if makes_nan else "Inf"
        if not makes_nan and not given and self._overflows():
            what = f"overflow of {outputs[0].dtype}"
        place = self.place
        return BadOperation(
            str(self.func), what, place.where, place.module, place.node, place.forward_operator,
            place.source, self.number, tuple(inputs), tuple(outputs), given,
        )  # fmt: skip

    def _overflows(self) -> bool:
        """Return whether the same call with numbers of 64 bits stays finite."""
        if self.name in _CASTS:
            return True
        if self.func._schema.is_mutable:
            return False  # its inputs are gone
        try:
            again = self.func(*as_float64(self.args), **{key: as_float64(value) for key, value in self.kwargs.items()})
        except Exception:  # an operator that has no kernel for float64
            return False
        return not any(map(_is_bad, tensors_in(again)))


def operator_name(func: Any) -> str:
    """Return the name of an operator without namespace and overload."""
    return str(func._schema.name).rpartition("::")[2]


def _is_bad(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta" or not tensor.numel():
        return False
    try:
        return not bool(torch.isfinite(stored_numbers(tensor)).all())
    except (NotImplementedError, RuntimeError):  # nested, of eight bits: not looked at
        return False


def _has_nan(tensor: Tensor) -> bool:
    return bool(stored_numbers(tensor).isnan().any())


def _has_plus(tensor: Tensor) -> bool:
    return bool((stored_numbers(tensor) == math.inf).any()) if not tensor.is_complex() else False


def _key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, of distributed ones this process's part."""
    for tensor in tensors_of(value):
        yield _torch.local_tensor(tensor) if type(tensor) is not Tensor else tensor


def _inputs(func: Any, name: str, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an operator reads, by the names of its arguments."""
    for index, argument in enumerate(func._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and (argument.kwarg_only or (index == 0 and name in _OVERWRITES)):
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for number, tensor in enumerate(tensors_in(value)):
            yield (argument.name if isinstance(value, Tensor) else f"{argument.name}[{number}]"), tensor


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to; those of a list of tensors are not among its results."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        local = _torch.local_tensor(tensor)
        if local is not None:
            yield name, local


# -- where an operator runs ------------------------------------------------------------------------------------------


_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH: Final = os.path.dirname(os.path.abspath(inspect.getfile(torch))) + os.sep
_OPTIMIZERS: Final = os.path.join(_TORCH, "optim") + os.sep


class OperatorPlace(NamedTuple):
    """Where one operator was called."""

    where: str
    """``"forward"``, ``"backward"``, ``"optimizer"`` or ``"outside of the model"``."""
    module: str | None
    node: str = ""
    forward_operator: str = ""
    line: tuple[str, int, str] | None = None
    """File, line and function of the code."""

    @property
    def source(self) -> str:
        """The line of code, with its text where the file can be read."""
        if self.line is None:
            return ""
        path, number, function = self.line
        text = linecache.getline(path, number).strip()
        return f"{os.path.basename(path)}:{number}, in {function}" + (f": {text}" if text else "")


def _user_line(run_by: CodeType) -> tuple[tuple[str, int, str] | None, bool]:
    """Return file, line and function of the innermost code that is not torch's or ours, and whether it steps."""
    frame: FrameType | None = sys._getframe(1)
    in_optimizer = False
    while frame is not None:
        path = frame.f_code.co_filename
        in_optimizer = in_optimizer or path.startswith(_OPTIMIZERS)
        if frame.f_code is run_by:
            return None, in_optimizer
        if not path.startswith((_OURS, _TORCH)) and not path.startswith("<"):
            return (path, frame.f_lineno, frame.f_code.co_name), in_optimizer
        frame = frame.f_back
    return None, in_optimizer
