"""Attach hooks to gradients of tensors and to nodes of the autograd graph: ``attach_tensor`` and ``attach_node``.

Users call these verbs. Each adds a `GraphMember` to one `GraphHook` per tensor, or per node and kind, and returns a
`HookHandle`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hookline.errors import HookSignatureError, OptionError, TargetError, UnhookableError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions, ForwardCounter
from hookline.sites.kinds import NODE, TENSOR, Kind
from hookline.sites.modules.module_hooks import LOCK
from hookline.sites.tensors.graph_hooks import Gather, GraphMember, HookInGraph, NodeHook, TensorHook
from hookline.sites.tensors.parameter_hooks import hook_leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import Attachment, HookAtSite

_MODES: Final = ("all", "any")


def attach_tensor(
    tensor: Tensor | Iterable[Tensor],
    hook: Hook,
    *,
    on: str | Kind = Kind.GRAD,
    mode: Literal["all", "any"] = "all",
    observe: bool = False,
    name: str | None = None,
    profile: bool = False,
) -> HookHandle:
    """Put a hook on the gradient of a tensor.

    Recipe::

        hidden = model.encoder(x)
        with hookline.attach_tensor(hidden, lambda grad: grad.clamp(-1, 1)):
            model.decoder(hidden).sum().backward()

    Args:
        tensor: A tensor that needs a gradient, or several: then the hook watches their gradients together, and its
            return value is ignored.
        hook: ``hook(grad)``, once in each backward pass that reaches the tensor; what it returns, unless None,
            replaces the gradient and needs its shape and dtype. ``grad`` is None if only other outputs of the same
            operation were used. For several tensors: ``hook(grads)``, a tuple with None where no gradient came. A
            hook that declares a keyword-only ``site`` gets one.
        on: ``"grad"``, or ``"param_grad"``: ``hook(tensor)`` when a backward pass has accumulated into the ``.grad``
            of a leaf; on several leaves, it is called for each.
        mode: For several tensors: ``"all"`` calls the hook once per backward pass, when the last of the gradients
            that this pass reaches is there; ``"any"`` calls ``hook(grad)`` with the first that comes.
        observe: Ignore the return value, and run after all edits of the tensor's gradient.
        name: A name for ``site`` and reports; by default the shape of the tensor and the name of the function.
        profile: Measure what the hook costs, for ``handle.report().cost_us``.

    The hook sits on the tensor as it is now: if it is changed in place later, it sees the gradient of the value before.
    Neither hook nor handle keeps a tensor or a graph alive. (Therefore, where a pass does not reach a tensor that is
    gone itself, ``mode="all"`` cannot know it and calls the hook at the end of the pass.)

    Inside a function that ``torch.compile`` compiles, a hook on one tensor is part of the graph, as with
    ``tensor.register_hook``: what comes back is torch's own handle, which counts nothing and has no report, and the
    hook is given no ``site``. Several tensors, and ``profile=True``, break the graph there.

    Raises:
        UnhookableError: if no gradient will come: not a tensor, none needed, or ``param_grad`` on a computed tensor.
        KindError, OptionError, TargetError, HookSignatureError: before anything is attached.
    """
    if not torch.compiler.is_dynamo_compiling():
        return _attach(tensor, hook, on, mode, observe=observe, name=name, profile=profile)
    if isinstance(tensor, Tensor) and tensor.requires_grad and not profile:
        if on == "grad":
            return tensor.register_hook(_watching(hook) if observe else hook)  # type: ignore[no-any-return, no-untyped-call]
        if on == "param_grad":
            return tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]
    return _attach_between_graphs(tensor, hook, on, mode, observe=observe, name=name, profile=profile)


def _attach(
    tensor: Tensor | Iterable[Tensor],
    hook: Hook,
    on: str | Kind,
    mode: str,
    *,
    observe: bool,
    name: str | None,
    profile: bool,
) -> HookHandle:
    kind = Kind.parse(on, TENSOR)
    if mode not in _MODES:
        raise OptionError(f"mode= is 'all' or 'any', got {mode!r}.")
    if isinstance(hook, Tensor) and callable(tensor):
        raise HookSignatureError("The arguments are swapped: write attach_tensor(tensor, hook).")
    attachment = new_attachment(
        hook, kind, AttachOptions(observe=observe, name=name, profile=profile), site_type=TENSOR
    )
    if isinstance(tensor, Tensor):
        _check_gradient([tensor])
        place = _put_on_one if kind is Kind.GRAD else _put_on_leaves
        return _put(attachment, place, [tensor], name or _described(tensor))
    tensors = _as_tensors(tensor)
    if kind is Kind.PARAM_GRAD:
        if mode != "all":
            raise OptionError("mode='any' goes with on='grad'; a param_grad hook is called for each leaf.")
        _check_gradient(tensors)
        return _put(attachment, _put_on_leaves, tensors, name or "tensors")
    if mode == "any":
        tensors = [one for one in tensors if one.requires_grad] or tensors
    _check_gradient(tensors)
    return _put(attachment, _put_on_all if mode == "all" else _put_on_any, tensors, name or f"{len(tensors)} tensors")


_attach_between_graphs: Final = _torch.untraced(_attach)
"""For what no graph can carry: the compiler ends one graph before it and begins another after it."""


def _watching(hook: Hook) -> Hook:
    """Return the hook without its return value, for code that is being compiled."""

    def watch(grad: Any) -> None:
        hook(grad)

    return watch


# -- checks ------------------------------------------------------------------------------------------------------


def _as_tensors(given: Any) -> list[Tensor]:
    if isinstance(given, nn.Module | Mapping | str) or not isinstance(given, Iterable):
        hint = "; for the parameters of a module: attach(module, hook, on='param_grad')"
        raise UnhookableError(
            f"attach_tensor takes a tensor or a list of tensors, got {type_name(given)}"
            f"{hint if isinstance(given, nn.Module) else ''}."
        )
    tensors = list(given)
    if not tensors:
        raise TargetError("attach_tensor was given no tensors.")
    strange = [f"{index} ({type(one).__name__})" for index, one in enumerate(tensors) if not isinstance(one, Tensor)]
    if strange:
        those = f"the one at {strange[0]} is" if len(strange) == 1 else f"those at {_listed(strange)} are"
        raise UnhookableError(f"attach_tensor takes tensors; {those} none.")
    return tensors


def _check_gradient(tensors: list[Tensor]) -> None:
    bare = [index for index, tensor in enumerate(tensors) if not tensor.requires_grad]
    if not bare:
        return
    if len(tensors) == 1:
        which = f"The {_described(tensors[0])} needs"
    else:
        those = f"the one at position {bare[0]} needs" if len(bare) == 1 else f"those at positions {_listed(bare)} need"
        which = f"Of {len(tensors)} tensors, {those}"
    raise UnhookableError(
        f"{which} no gradient, so there is none to hook: call requires_grad_() before the forward, or take a tensor "
        "that was computed, with gradients enabled, from one that needs them."
    )


def _listed(items: list[Any]) -> str:
    return ", ".join(map(str, items))


def _described(tensor: Tensor) -> str:
    return f"tensor {tuple(tensor.shape)}"


# -- attaching ---------------------------------------------------------------------------------------------------


def _put(
    attachment: Attachment, place: Callable[[Attachment, list[Tensor], str], None], tensors: list[Tensor], name: str
) -> HookHandle:
    """Attach to all of the tensors, or, if one of them refuses, to none."""
    with LOCK:
        handle = HookHandle(attachment)
        try:
            place(attachment, tensors, name)
        except BaseException:
            handle.remove()
            raise
        return handle


def _put_on_one(attachment: Attachment, tensors: list[Tensor], name: str) -> None:
    torch_hook = TensorHook.of(tensors[0])
    torch_hook.add(GraphMember(attachment, HookInGraph(attachment, name, torch_hook)))


def _put_on_leaves(attachment: Attachment, tensors: list[Tensor], name: str) -> None:
    computed = next((tensor for tensor in tensors if not tensor.is_leaf), None)
    if computed is not None:
        raise UnhookableError(
            f"Only leaves accumulate a gradient; this {_described(computed)} was computed "
            f"({type(computed.grad_fn).__name__}). Use on='grad'."
        )
    for index, leaf in {id(leaf): (index, leaf) for index, leaf in enumerate(tensors)}.values():
        hook_leaf(attachment, name if len(tensors) == 1 else f"{name}[{index}]", leaf, ForwardCounter())


def _put_on_all(attachment: Attachment, tensors: list[Tensor], name: str) -> None:
    Gather(attachment, name, tensors, waits=True)


def _put_on_any(attachment: Attachment, tensors: list[Tensor], name: str) -> None:
    Gather(attachment, name, tensors, waits=False)


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
    """A hook on the node that accumulates into a leaf, which only we hold."""

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
    """Return whether what the node, or failing that the nearest ones that it leads to, kept for the backward is freed.

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
