"""Know where an operator was called: module, direction, function, line of code; also in the backward.

`OperatorRun` and `replay_check` ask `OperatorPlaces` at every operator. A backward operator is told by the number of
its graph node: the forward operator that made the node was noted under the same number.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from hookline.errors import HooklineError
from hookline.sites import _torch
from hookline.sites.functions.function_names import find_places
from hookline.sites.wrappers import clean_modules

__all__ = ["OperatorPlace", "OperatorPlaces"]

_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH: Final = os.path.dirname(os.path.abspath(inspect.getfile(torch))) + os.sep
_OPTIMIZERS: Final = os.path.join(_TORCH, "optim") + os.sep


class OperatorPlace(NamedTuple):
    """Where one operator was called."""

    where: str
    """``"forward"``, ``"backward"``, ``"optimizer"`` or ``"outside of the model"``."""
    module: str | None
    called: Any
    """The function of torch that the code called."""
    node: str = ""
    forward_operator: str = ""
    line: tuple[str, int, str] | None = None
    """File, line and function of the code."""

    @property
    def function(self) -> str:
        """The name of the function; empty if it is not known."""
        if self.called is None:
            return ""
        try:
            return find_places(self.called)[0].name
        except (HooklineError, TypeError):
            return str(getattr(self.called, "__name__", ""))

    @property
    def source(self) -> str:
        """The line of code, with its text where the file can be read."""
        if self.line is None:
            return ""
        path, number, function = self.line
        text = linecache.getline(path, number).strip()
        return f"{os.path.basename(path)}:{number}, in {function}" + (f": {text}" if text else "")


class _CurrentFunction(TorchFunctionMode):
    """Note which function of torch the code has called."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.function = self.function, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.function = before


class OperatorPlaces:
    """Follow modules and functions while the block lasts.

    Args:
        model: The model.
        run_by: The code of the function that runs the step: the code above it has only caused the run.
        at_output: Is called with the name and the output of each module.
    """

    def __init__(self, model: nn.Module, run_by: CodeType, at_output: Callable[[str, Any], None] | None = None) -> None:
        self._run_by = run_by
        self._names = {id(module): name for name, module in clean_modules(model)}
        self._parameters = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._at_output = at_output
        self._functions = _CurrentFunction()
        self._running: list[str] = []
        self._made: dict[int, tuple[str, OperatorPlace]] = {}
        """The operator that made the graph node of that number, and its place."""
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        # Hooks on all modules: the second run is eager, and hooks on the model's own would make its code compile anew.
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._functions.__exit__(*exc_info)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            name = self._running.pop()
            if self._at_output is not None:
                self._at_output(name, output)

    def of_operator(self, operator: str) -> OperatorPlace:
        """Return where the operator is called that runs now, and note it for the backward of its node."""
        node = None if _torch.graph_task_id() == -1 or _torch.in_recomputation() else _torch.current_node()
        if node is not None:
            return self._of_node(node)
        line, in_optimizer = _user_line(self._run_by)
        module = self._running[-1] if self._running else None
        where = "forward" if module is not None else "optimizer" if in_optimizer else "outside of the model"
        place = OperatorPlace(where, module, self._functions.function, line=line)
        # The node of an operator is made before the operator is called; later ones without a node change nothing.
        self._made.setdefault(_torch.sequence_number() - 1, (operator, place))
        return place

    def _of_node(self, node: Any) -> OperatorPlace:
        name = node.name().rpartition("::")[2]
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if leaf is not None:
            return OperatorPlace("backward", self._parameters.get(id(leaf), "").rpartition(".")[0] or None, None, name)
        operator, made = self._made.get(_torch.sequence_number_of(node), ("", None))
        module, line = (None, None) if made is None else (made.module, made.line)
        return OperatorPlace("backward", module, None, name, operator, line)


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
