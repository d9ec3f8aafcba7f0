"""Hooks on a node of the autograd graph, before and after it runs.

Takes a node, a gradient edge or a tensor and a hook from the user, hands members to one torch_hook per node and kind
and a `HookHandle` back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hookline.errors import HookSignatureError, UnhookableError
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import NODE, Kind
from hookline.sites.modules.module_hooks import LOCK
from hookline.sites.tensors.graph_hooks import GraphMember, HookInGraph, NodeHook

if TYPE_CHECKING:
    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import HookAtSite

__all__ = ["attach_node"]

# How far to look for a sign that a node has run, if it keeps nothing itself.
_NODES_TO_ASK: Final = 256


def attach_node(
    node: Any,
    hook: Hook,
    *,
    on: str | Kind = "pre",
    observe: bool = False,
    name: str | None = None,
    profile: bool = False,
) -> HookHandle:
    """Put a hook on a node of the autograd graph.

    Recipe::

        loss = model(x).square().mean()
        with hookline.attach_node(loss.grad_fn, lambda grad_inputs, grad_outputs: print(grad_inputs), on="post"):
            loss.backward()

    Args:
        node: A node (``tensor.grad_fn``), an edge (``torch.autograd.graph.get_gradient_edge``), or a tensor, which
            stands for the node that its gradient goes to: the one that computed it, or for a leaf the one that
            accumulates into its ``.grad``.
        hook: With ``on="pre"``: ``hook(grad_outputs)``, before the node runs; it may return other ``grad_outputs``.
            With ``on="post"``: ``hook(grad_inputs, grad_outputs)``, after it; it may return other ``grad_inputs``.
            Both are tuples; in what is returned, None takes a gradient away. A hook that declares a keyword-only
            ``site`` gets one.
        on: ``"pre"`` or ``"post"``.
        observe: Ignore the return value, and run after all edits at the node.
        name: A name for ``site`` and reports; by default the node's and the function's own.
        profile: Measure what the hook costs, for ``handle.report().cost_us``.

    The order around a tensor: hooks of the tensor, ``retain_grad``, node ``pre``, the node (for a leaf: accumulate,
    then its ``param_grad`` hooks), node ``post``. On a leaf, ``grad_inputs`` of the post hook is ``()``.

    A handle keeps no graph alive, with one exception: torch makes the accumulating node of a leaf anew whenever
    nobody holds it, without its hooks, so hookline holds it, and with it the leaf, until the hook is removed.

    Raises:
        UnhookableError: if there is no node, or it has run and what it kept for that is freed.
        KindError, HookSignatureError: before anything is attached.
    """
    kind = Kind.parse(on, NODE)
    if callable(node) and (isinstance(hook, Tensor) or hasattr(hook, "next_functions")):
        raise HookSignatureError("The arguments are swapped: write attach_node(node, hook).")
    attachment = new_attachment(hook, kind, AttachOptions(observe=observe, name=name, profile=profile), site_type=NODE)
    found = _node_of(node)
    if _has_run(found):
        raise UnhookableError(
            f"{type(found).__name__} has run, or leads to what has run: a backward pass freed what it kept, and none "
            "will come through it again. Attach before that pass, or run it with retain_graph=True."
        )
    with LOCK:
        register = found.register_prehook if kind is Kind.NODE_PRE else found.register_hook
        torch_hook = (_HoldingNodeHook if _accumulates(found) else NodeHook).found_or_made(register)
        torch_hook.add(GraphMember(attachment, HookInGraph(attachment, name or type(found).__name__, torch_hook)))
        if isinstance(torch_hook, _HoldingNodeHook):
            _HELD[torch_hook] = found
        return HookHandle(attachment)


class _HoldingNodeHook(NodeHook):
    """A torch_hook on the node that accumulates into a leaf, which only we hold."""

    __slots__ = ()

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; the last one lets go of a leaf's node."""
        super().discard(entry)
        if not self.members:
            _HELD.pop(self, None)


_HELD: Final[dict[_HoldingNodeHook, Any]] = {}
"""The accumulating nodes of leaves that carry hooks."""


def _node_of(given: Any) -> Any:
    if isinstance(given, GradientEdge):
        return given.node
    if isinstance(given, Tensor):
        if not given.requires_grad:
            raise UnhookableError(
                f"The tensor {tuple(given.shape)} needs no gradient, so it has no node: pass one that was computed, "
                "with gradients enabled, from tensors that need them."
            )
        return get_gradient_edge(given).node
    if not hasattr(given, "register_prehook") or not hasattr(given, "next_functions"):
        what = "None, as the grad_fn of a tensor that was not computed" if given is None else repr(given)
        raise UnhookableError(
            f"attach_node takes a node of the autograd graph, got {what}; pass the grad_fn of a tensor that was "
            "computed from ones that need gradients, or the tensor itself."
        )
    return given


def _accumulates(node: Any) -> bool:
    return hasattr(node, "variable")


def _has_run(node: Any) -> bool:
    """Whether what the node, or failing that the nearest ones that it leads to, kept for the backward is freed.

    One that still keeps something shows that the node is yet to run: its backward would have come by there.
    """
    freed = False
    seen = {node}
    todo = [node]
    while todo and len(seen) <= _NODES_TO_ASK:
        node = todo.pop(0)
        if _accumulates(node):
            continue
        keeps = _torch.keeps_saved(node)
        if keeps:
            return False
        if keeps is None:
            more = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= more
            todo += more
        else:
            freed = True
    return freed
