"""Show the graph that a loss would go back through: modules, parameters, what is not reached, where it was cut.

Users call `graph`, which walks ``grad_fn`` and its edges and returns an `AutogradGraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.errors import OptionError, TargetError
from hookline.guard.guard import rollback
from hookline.guard.rng import kept_rng
from hookline.messages import type_name
from hookline.sites.attach import attach
from hookline.sites.functions.attach_function import attach_function
from hookline.sites.functions.function_site import FunctionSite
from hookline.sites.handle import HandleSet
from hookline.sites.site_info import Site
from hookline.sites.wrappers import clean_modules
from hookline.tree import tensors_of

__all__ = ["AutogradGraph", "GraphNode", "graph"]

_SHOWN: Final = 200
"""Lines of the tree."""


@dataclass(eq=False)
class GraphNode:
    """One node of the graph."""

    name: str
    """The class of the node (``AddmmBackward0``), or the name of a parameter."""
    module: str = ""
    """The module whose forward made it, as far as it is known."""
    is_leaf: bool = False
    """Whether gradients end here: a parameter or another leaf."""
    shape: tuple[int, ...] = ()
    """Of a leaf, its shape."""
    inputs: list[GraphNode] = field(default_factory=list)
    """The nodes that it sends gradients to."""

    def __str__(self) -> str:
        if self.is_leaf:
            return f"{self.name} {self.shape}"
        return f"{self.name}  [{self.module}]" if self.module else self.name


class AutogradGraph:
    """The graph of a loss; prints as a tree."""

    def __init__(
        self, root: GraphNode, nodes: list[GraphNode], parameters: dict[Tensor, str], cuts: dict[str, str]
    ) -> None:
        self.root = root
        """The node of the loss."""
        self.nodes = nodes
        """Every node, the loss first."""
        self.reached = sorted(node.name for node in nodes if node.is_leaf)
        """The parameters, and other leaves, that get a gradient."""
        self.unused = [name for each, name in parameters.items() if each.requires_grad and name not in self.reached]
        """Parameters that want a gradient and get none."""
        self.frozen = [name for each, name in parameters.items() if not each.requires_grad]
        """Parameters that want none."""
        self.detached = cuts
        """Modules in which the graph is cut, and how; known if `graph` was given a function."""

    def __str__(self) -> str:
        lines = list(_tree(self.root))
        more = len(lines) - _SHOWN
        lines = [*lines[:_SHOWN], f"… and {more} more lines"] if more > 0 else lines
        lines += [f"cut in {name or '(the model)'}: {how}" for name, how in self.detached.items()]
        lines += [f"not reached: {name}" for name in self.unused]
        return "\n".join([*lines, *(f"frozen: {name}" for name in self.frozen)])

    __repr__ = __str__


def graph(loss: Tensor | Callable[[], Tensor], model: nn.Module | None = None) -> AutogradGraph:
    """Return the graph that ``loss.backward()`` would go through.

    Recipe::

        print(hookline.debug.graph(loss, model))
        print(hookline.debug.graph(lambda: loss_of(model(x)), model).detached)

    Args:
        loss: The loss; or a function that computes it, which is called once: then every node has the name of its
            module, and the modules that cut the graph (``detach()``, ``no_grad``, ``.data``) are found. Random streams
            and the state of the model are put back afterwards.
        model: The model, for names and for the parameters that are not reached. From a loss alone, the nodes that
            read a parameter have the name of its module.

    Raises:
        OptionError: for a loss without a graph.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TargetError(f"graph takes a torch.nn.Module, got {type_name(model)}.")
    makers: dict[Any, str] = {}
    cuts: dict[str, str] = {}
    if not isinstance(loss, Tensor):
        with rollback(model) if model is not None else kept_rng():  # dropout draws, BatchNorm counts
            loss = _watched(loss, model, makers, cuts)
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        what = "a tensor without a graph" if isinstance(loss, Tensor) else type_name(loss)
        where = "; ".join(f"{name or '(the model)'} {how}" for name, how in cuts.items())
        raise OptionError(
            f"graph takes a loss that was computed from something with requires_grad, got {what}"
            f"{'; cut: ' + where if where else '; was it computed under torch.no_grad(), or detached?'}."
        )
    parameters = {} if model is None else _parameter_names(model)
    root, nodes = _walked(loss.grad_fn, {id(each): name for each, name in parameters.items()}, makers)
    return AutogradGraph(root, nodes, parameters, cuts)


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters with their names, without the keys of wrappers; a shared one has its first name."""
    names: dict[Tensor, str] = {}
    for name, module in clean_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, f"{name}.{key}" if name else key)
    return names


def _walked(top: Any, names: dict[int, str], makers: dict[Any, str]) -> tuple[GraphNode, list[GraphNode]]:
    """Return the node of ``top`` and all nodes; without recursion, since graphs are deep."""
    made: dict[Any, GraphNode] = {top: _node(top, names, makers)}
    waiting = [top]
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in made:
                made[below] = _node(below, names, makers)
                waiting.append(below)
            made[node].inputs.append(made[below])
    for each in made.values():
        owners = {
            below.name.rpartition(".")[0] for below in each.inputs if below.is_leaf and below.name in names.values()
        }
        if not each.module and len(owners) == 1:
            each.module = owners.pop()
    return made[top], list(made.values())


def _node(node: Any, names: dict[int, str], makers: dict[Any, str]) -> GraphNode:
    variable = getattr(node, "variable", None)  # of AccumulateGrad: the leaf itself
    if not isinstance(variable, Tensor):
        return GraphNode(node.name(), makers.get(node, ""))
    return GraphNode(names.get(id(variable), "(leaf)"), is_leaf=True, shape=tuple(variable.shape))


def _tree(root: GraphNode) -> Iterator[str]:
    """Return the lines of the tree; what several nodes read is written out once."""
    seen: set[int] = set()
    waiting = [(root, "", "")]
    while waiting:
        node, first, rest = waiting.pop()
        again = id(node) in seen and bool(node.inputs)
        seen.add(id(node))
        yield f"{first}{node}{'  (see above)' if again else ''}"
        if not again:
            last = len(node.inputs) - 1
            below = [
                (child, rest + ("└─ " if index == last else "├─ "), rest + ("   " if index == last else "│  "))
                for index, child in enumerate(node.inputs)
            ]
            waiting += reversed(below)


# -- a function that computes the loss -----------------------------------------------------------------------------


def _watched(compute: Callable[[], Any], model: nn.Module | None, makers: dict[Any, str], cuts: dict[str, str]) -> Any:
    """Call ``compute``; note which module made which node (``makers``), and which module cut the graph (``cuts``)."""
    if not callable(compute):
        return compute
    if model is None:
        return compute()
    handles = HandleSet()
    try:
        handles.add(attach(model, "*", _see_module(makers, cuts), with_kwargs=True, observe=True, name="graph"))
        cutting = ["torch.Tensor.detach", "torch.Tensor.detach_", "torch.Tensor.data.__get__", "torch.detach"]
        handles.add(attach_function(cutting, _see_cut(cuts), within=model, observe=True, name="graph", strict=False))
        return compute()
    finally:
        handles.remove(quiet=True)


def _see_module(makers: dict[Any, str], cuts: dict[str, str]) -> Callable[..., None]:
    def see(module: nn.Module, args: Any, kwargs: Any, output: Any, *, site: Site) -> None:
        outputs = tensors_of(output)
        inputs = tensors_of((args, kwargs))
        known = {leaf.grad_fn for leaf in inputs}
        for node in (tensor.grad_fn for tensor in outputs):
            _name_nodes(node, known, makers, site.name)
        floats = [tensor for tensor in outputs if tensor.is_floating_point()]
        wants = any(t.requires_grad for t in inputs) or any(p.requires_grad for p in module.parameters(recurse=False))
        if floats and wants and not any(tensor.requires_grad for tensor in floats):
            how = "its outputs need no gradient, though its inputs or parameters do"
            cuts.setdefault(site.name, how + ("" if torch.is_grad_enabled() else " (gradients are off: no_grad)"))

    return see


def _name_nodes(top: Any, known: set[Any], makers: dict[Any, str], name: str) -> None:
    """Give the nodes that a module made its name: those below its output, down to its inputs and to inner modules."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if node is None or node in known or node in makers or hasattr(node, "variable"):
            continue
        makers[node] = name
        waiting += [below for below, _ in node.next_functions]


def _see_cut(cuts: dict[str, str]) -> Callable[..., None]:
    def see(fn: FunctionSite, inputs: Any, outputs: Any) -> None:
        if any(tensor.requires_grad for tensor in inputs) and fn.module is not None:
            cuts[fn.module] = f"it calls {fn.name.rpartition('torch.')[2]} on a tensor that needs a gradient"

    return see
