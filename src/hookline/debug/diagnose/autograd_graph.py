"""Say which parameters a loss reaches, and where the graph between is cut.

Users call `graph`, which walks ``grad_fn`` and its edges and returns an `AutogradGraph`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.guard.guard import rollback
from hookline.messages import type_name
from hookline.sites.attach import attach
from hookline.sites.functions.attach_function import attach_function
from hookline.sites.handle import HandleSet
from hookline.sites.site_info import FunctionSite, Site
from hookline.sites.targets import check_model
from hookline.sites.wrappers import clean_modules
from hookline.tables import ShownAsTable, Table
from hookline.tree import tensors_of

__all__ = ["AutogradGraph", "graph"]


@dataclass(frozen=True, repr=False)
class AutogradGraph(ShownAsTable):
    """What the backward of a loss reaches; prints as a table."""

    reached: list[str]
    """The parameters that get a gradient."""
    unused: list[str]
    """Parameters that want a gradient and get none."""
    frozen: list[str]
    """Parameters that want none."""
    detached: dict[str, str]
    """Modules in which the graph is cut, and how; known if `graph` was given a function."""

    def _table(self) -> Table:
        parts = (("reached", self.reached), ("not reached", self.unused), ("frozen", self.frozen))
        rows = [(name, state) for state, names in parts for name in names]
        foot = [f"cut in {name or '(the model)'}: {how}" for name, how in self.detached.items()]
        return Table(("parameter", "gradient"), rows, foot=foot)


def graph(loss: Tensor | Callable[[], Tensor], model: nn.Module) -> AutogradGraph:
    """Return which parameters ``loss.backward()`` would reach.

    Recipe::

        print(hookline.debug.graph(loss, model))
        print(hookline.debug.graph(lambda: loss_of(model(x)), model).detached)

    Args:
        loss: The loss; or a function that computes it, which is called once: then the modules that cut the graph
            (``detach()``, ``no_grad``, ``.data``) are found. Random streams and the state of the model are put back
            afterwards.
        model: The model.

    Raises:
        OptionError: for a loss without a graph.
    """
    check_model(model)
    cuts: dict[str, str] = {}
    found: Any = loss
    if callable(loss):
        with rollback(model):  # dropout draws, BatchNorm counts
            found = _watched(loss, model, cuts)
    if not isinstance(found, Tensor) or found.grad_fn is None:
        what = "a tensor without a graph" if isinstance(found, Tensor) else type_name(found)
        where = "; ".join(f"{name or '(the model)'} {how}" for name, how in cuts.items())
        raise OptionError(
            f"graph takes a loss that was computed from something with requires_grad, got {what}"
            f"{'; cut: ' + where if where else '; was it computed under torch.no_grad(), or detached?'}."
        )
    leaves = _leaves_below(found.grad_fn)
    reached: list[str] = []
    unused: list[str] = []
    frozen: list[str] = []
    for parameter, name in _parameter_names(model).items():
        (reached if id(parameter) in leaves else unused if parameter.requires_grad else frozen).append(name)
    return AutogradGraph(reached, unused, frozen, cuts)


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters with their names, without the keys of wrappers; a shared one has its first name."""
    names: dict[Tensor, str] = {}
    for name, module in clean_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, f"{name}.{key}" if name else key)
    return names


def _leaves_below(top: Any) -> set[int]:
    """Return the ids of the leaves that gradients end at; without recursion, since graphs are deep."""
    seen, waiting = {top}, [top]
    while waiting:
        below = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= below
        waiting += below
    return {id(node.variable) for node in seen if hasattr(node, "variable")}  # of AccumulateGrad: the leaf itself


def _watched(compute: Callable[[], Any], model: nn.Module, cuts: dict[str, str]) -> Any:
    """Call ``compute``; note which module cut the graph."""

    def see_module(module: nn.Module, args: Any, kwargs: Any, output: Any, *, site: Site) -> None:
        floats = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        given = [*tensors_of((args, kwargs)), *module.parameters(recurse=False)]
        wants = any(tensor.requires_grad for tensor in given)
        if floats and wants and not any(tensor.requires_grad for tensor in floats):
            how = "its outputs need no gradient, though its inputs or parameters do"
            cuts.setdefault(site.name, how + ("" if torch.is_grad_enabled() else " (gradients are off: no_grad)"))

    def see_cut(fn: FunctionSite, inputs: Any, outputs: Any) -> None:
        if any(tensor.requires_grad for tensor in inputs) and fn.module is not None:
            cuts[fn.module] = f"it calls {fn.name.rpartition('torch.')[2]} on a tensor that needs a gradient"

    handles = HandleSet()
    try:
        handles.add(attach(model, "*", see_module, with_kwargs=True, observe=True, name="graph"))
        cutting = ["torch.Tensor.detach", "torch.Tensor.detach_", "torch.Tensor.data.__get__", "torch.detach"]
        handles.add(attach_function(cutting, see_cut, within=model, observe=True, name="graph", strict=False))
        return compute()
    finally:
        handles.remove(quiet=True)
