"""Attach hooks to gradients of tensors, to nodes of the autograd graph and to what it keeps for the backward.

Users call `attach_tensor`, `attach_node` and `saved_tensors`; metta/builders.py and sglang/dumpers.py call
`attach_tensor` too. Each calls torch's own verb (``register_hook``, ``register_multi_grad_hook``, ``register_prehook``,
``saved_tensors_hooks``). Hooks on gradients are given to torch as a `_GraphHook`, which counts and checks them and
tells them their site. ``param_grad`` hooks on leaves go to ``parameters``.

A `_GraphHook` has an *attachment*, what one call of a verb has asked for, and an *entry*, this hook at this one site
(`Attachment` and `HookAtSite`, both in ``hook_at_site``). metta/builders.py tells our hooks on a tensor from others by
the attribute ``attachment`` of a `_GraphHook`, and reads ``order`` there: rename them together.

What torch is given belongs to the graph, and goes with it. It refers to the attachment and its entry; the attachment to
its entry and, by ``on_remove``, to torch's handle; the entry refers back weakly. There must be no ring of strong
references: everything is to be freed exactly when torch alone would free it (`attach_node` on a leaf is the exception).

In code that is being compiled, `attach_tensor` on one tensor returns torch's own handle. The compiler traces it up to
there, so it may do only what can be traced. Tests: tests/sites/test_tensors.py, and the conformance tests of that
folder. A new kind of hook here: see the head of ``kinds``, and add it to the rows of `_KINDS` in
tests/helpers_sites.py. A new public name is also a line in hookline/__init__.pyi, in tests/test_public_names.py and in
docs/sources.md.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.utils.hooks import unserializable_hook

from hookline.errors import HookSignatureError, OptionError, ScopeError, UnhookableError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.gradients import fitting, fitting_all
from hookline.sites.handle import Handle, HookHandle, attaching
from hookline.sites.hook_at_site import NO_MODEL, Attachment, AttachOptions, HookAtSite, HookContainer, Site
from hookline.sites.kinds import NODE, TENSOR, Kind
from hookline.sites.parameters import hook_leaf

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook


def attach_tensor(
    tensor: Tensor | Iterable[Tensor],
    hook: Hook,
    *,
    on: str | Kind = Kind.GRAD,
    mode: Literal["all", "any"] = "all",
    observe: bool = False,
    name: str | None = None,
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
        observe: Ignore the return value, and run after all edits of ours of the tensor's gradient.
        name: A name for ``site`` and reports; by default the shape of the tensor and the name of the function.

    The hook sits on the tensor as it is now: if it is changed in place later, it sees the gradient of the value before.
    Neither hook nor handle keeps a tensor or a graph alive, but for a hook on several: as torch's own, it keeps their
    graph until it is removed.

    Inside a function that ``torch.compile`` compiles, a hook on one tensor is part of the graph, as with
    ``tensor.register_hook``: what comes back is torch's own handle, which counts nothing and has no report, and the
    hook is given no ``site``. Several tensors break the graph there.

    Raises:
        UnhookableError: if no gradient will come: not a tensor, none needed, or ``param_grad`` on a computed tensor.
        KindError, OptionError, HookSignatureError: before anything is attached.
    """
    if not torch.compiler.is_dynamo_compiling():
        return _attach(tensor, hook, on, mode, AttachOptions(observe=observe, name=name))
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        if on == "grad":
            return tensor.register_hook(_watching(hook) if observe else hook)  # type: ignore[no-any-return, no-untyped-call]
        if on == "param_grad":
            return tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]
    return _attach_between_graphs(tensor, hook, on, mode, AttachOptions(observe=observe, name=name))


def _attach(
    tensor: Tensor | Iterable[Tensor], hook: Hook, on: str | Kind, mode: str, options: AttachOptions
) -> HookHandle:
    kind = Kind.parse(on, TENSOR)
    if mode not in ("all", "any"):
        raise OptionError(f"mode= is 'all' or 'any', got {mode!r}.")
    attachment = new_attachment(hook, kind, options, site_type=TENSOR)
    tensors = _tensors_in(tensor)
    if mode == "any":
        if kind is Kind.PARAM_GRAD:
            raise OptionError("mode='any' goes with on='grad'; a param_grad hook is called for each leaf.")
        tensors = [one for one in tensors if one.requires_grad] or tensors
    _check_gradients(tensors)
    if kind is Kind.PARAM_GRAD:
        return _hook_leaves(attachment, tensors)
    if isinstance(tensor, Tensor):
        return _hook_graph(attachment, _described(tensor), tensor.register_hook)
    register = functools.partial(_register_together, tensors, mode)
    return _hook_graph(attachment, f"{len(tensors)} tensors", register)


_attach_between_graphs: Final = _torch.untraced(_attach)
"""For what no graph can carry: the compiler ends one graph before this call, and begins another after it."""


def _watching(hook: Hook) -> Hook:
    """Return the hook without its return value, for code that is being compiled."""

    def watch(grad: Any) -> None:
        hook(grad)

    return watch


def _register_together(tensors: list[Tensor], mode: Any, hook: _GraphHook) -> RemovableHandle:
    """Have torch call the hook with the gradients of all tensors, or with the first of them; none can be replaced."""

    def see(found: Any) -> None:
        hook.entry.run(found if mode == "any" else tuple(found))

    return register_multi_grad_hook(tensors, see, mode=mode)


def _hook_leaves(attachment: Attachment, leaves: list[Tensor]) -> HookHandle:
    """Attach to all of the leaves, each once; raise, and attach to none, if one of them is a computed tensor."""
    computed = next((tensor for tensor in leaves if not tensor.is_leaf), None)
    if computed is not None:
        raise UnhookableError(
            f"Only leaves accumulate a gradient; this {_described(computed)} was computed. Use on='grad'."
        )
    with attaching(attachment) as handle:
        for leaf in {id(leaf): leaf for leaf in leaves}.values():
            hook_leaf(attachment, attachment.options.name or _described(leaf), leaf, NO_MODEL)
    return handle


def _tensors_in(given: Any) -> list[Tensor]:
    """Return the one tensor that was given, or the several."""
    tensors = [given] if isinstance(given, Tensor) else list(given) if isinstance(given, Iterable) else []
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise UnhookableError(
            f"attach_tensor takes a tensor or a list of tensors, got {type_name(given)}; for parameters of a module: "
            "attach(module, hook, on='param_grad')."
        )
    return tensors


def _check_gradients(tensors: list[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            raise UnhookableError(
                f"The {_described(tensor)} at {index} needs no gradient, so there is none to hook: call "
                "requires_grad_() before the forward, or take a tensor that was computed, with gradients enabled, from "
                "one that needs them."
            )


def _described(tensor: Tensor) -> str:
    return f"tensor {tuple(tensor.shape)}"


def attach_node(
    node: Any, hook: Hook, *, on: str | Kind = "pre", observe: bool = False, name: str | None = None
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

    The order around a tensor: hooks of the tensor, ``retain_grad``, node ``pre``, the node (for a leaf: accumulate,
    then its ``param_grad`` hooks), node ``post``. On a leaf, ``grad_inputs`` of the post hook is ``()``.

    A handle keeps no graph alive, with one exception: torch makes the accumulating node of a leaf anew whenever
    nobody holds it, without its hooks, so hookline holds it, and with it the leaf, until the hook is removed.

    Raises:
        UnhookableError: if there is no node.
        KindError, HookSignatureError: before anything is attached.
    """
    kind = Kind.parse(on, NODE)
    attachment = new_attachment(hook, kind, AttachOptions(observe=observe, name=name), site_type=NODE)
    found = _node_of(node)
    register = found.register_prehook if kind is Kind.NODE_PRE else found.register_hook
    handle = _hook_graph(attachment, type(found).__name__, register)
    if hasattr(found, "variable"):  # it accumulates into a leaf
        _HELD[attachment] = found
    return handle


_HELD: Final[dict[Attachment, Any]] = {}
"""The accumulating nodes of leaves that carry hooks."""


def _node_of(given: Any) -> Any:
    if isinstance(given, Tensor) and given.requires_grad:
        given = get_gradient_edge(given)
    given = given.node if isinstance(given, GradientEdge) else given
    if not hasattr(given, "register_prehook"):
        raise UnhookableError(
            f"attach_node takes a node of the autograd graph, got {type_name(given)}; pass the grad_fn of a tensor "
            "that was computed, with gradients enabled, from ones that need them, or the tensor itself."
        )
    return given


# -- what torch is given ---------------------------------------------------------------------------------------------


class _HookInGraph(HookAtSite):
    """One hook on one tensor or node, as its entry; the attachment keeps it, and is kept by what torch is given."""

    __slots__ = ("_attachment",)

    def __init__(self, attachment: Attachment, name: str) -> None:
        super().__init__(attachment, name, HookContainer(), NO_MODEL)

    @property
    def attachment(self) -> Attachment:
        """The attachment, by a weak reference: all that asks for it is kept by the attachment, so it is there."""
        return cast(Attachment, self._attachment())

    @attachment.setter
    def attachment(self, attachment: Attachment) -> None:
        self._attachment = weakref.ref(attachment)

    def run(self, value: Any, *more: Any) -> Any:
        """Call the hook, with whatever options it has."""
        self.count()
        return self.call(value, more)

    def site(self, module: Any) -> Site:
        """Return the `Site` of this firing, which is in no module."""
        none: Any = None
        return Site(self.name, none, self.attachment.kind, self.fired - 1)


@unserializable_hook
class _GraphHook:
    """One hook of ours, as torch calls it with gradients."""

    __slots__ = ("__weakref__", "attachment", "entry")

    def __init__(self, attachment: Attachment, name: str) -> None:
        self.attachment = attachment
        self.entry = _HookInGraph(attachment, attachment.options.name or name)

    def __call__(self, value: Any, *more: Any) -> Any:
        result = self.entry.run(value, *more)
        if result is None or self.attachment.options.observe:
            return None
        return (fitting_all if isinstance(value, tuple) else fitting)(result, value, self.entry)


def _hook_graph(attachment: Attachment, name: str, register: Callable[[_GraphHook], RemovableHandle]) -> HookHandle:
    """Register a hook with torch; our observers stay behind our edits."""
    with attaching(attachment) as handle:
        registered = register(_GraphHook(attachment, name))
        attachment.on_remove = functools.partial(_take_off, registered)
        if not attachment.options.observe:
            _move_observers_back(registered)
    return handle


def _take_off(handle: RemovableHandle, attachment: Attachment) -> None:
    handle.remove()
    _HELD.pop(attachment, None)


def _move_observers_back(handle: RemovableHandle) -> None:
    hooks: Any = handle.hooks_dict_ref() if hasattr(handle, "hooks_dict_ref") else {}  # several tensors have many
    for number, other in list(hooks.items()):
        if isinstance(other, _GraphHook) and other.attachment.options.observe:
            hooks[number] = hooks.pop(number)  # torch goes by insertion, which move_to_end() leaves as it was


# -- saved tensors ---------------------------------------------------------------------------------------------------


def saved_tensors(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> SavedTensors:
    """Decide how tensors are kept for the backward pass.

    Recipe::

        def pack(tensor):  # indices and masks are kept as well
            return tensor.dtype, tensor.half() if tensor.is_floating_point() else tensor


        with hookline.saved_tensors(pack, lambda packed: packed[1].to(packed[0])) as scope:
            loss = model(x).square().mean()
        loss.backward()
        print(scope.packed, scope.unpacked)

    Args:
        pack: ``pack(tensor)``, called for each tensor that an operation inside the block keeps; it returns whatever
            is to be kept instead. A computed tensor comes detached, leaves come as they are; neither may be changed in
            place.
        unpack: ``unpack(packed)``, called with that for each use in a backward pass, wherever and in whatever
            thread it runs; it returns a tensor.

    Of nested scopes, also torch's own, the innermost is asked. Nothing happens until the scope is entered.
    """
    return SavedTensors(pack, unpack)


class SavedTensors(Handle):
    """A pair of functions that pack and unpack what autograd keeps; made by `saved_tensors`.

    A scope can be entered again, also inside itself and in several threads at once. Leaving the block ends the packing;
    so does ``remove()``, at once, for good and in all threads. What was packed is unpacked whenever it is needed. As
    with torch's own, blocks have to be left in the reverse order of entering.
    """

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        for hook in (pack, unpack):
            if not callable(hook):
                raise HookSignatureError(f"saved_tensors takes two functions, got {type_name(hook)}.")
        self._pack_hook, self._unpack_hook = pack, unpack
        self._counting = threading.RLock()  # also for pack and unpack: autograd has threads of its own
        self._open = 0
        self.packed = 0
        """The number of tensors that were packed."""
        self.unpacked = 0
        """The number of times a tensor was unpacked."""
        self.removed = False

    def remove(self, *, quiet: bool = False) -> None:
        """Pack nothing any more."""
        self.removed = True

    def __enter__(self) -> Self:
        if self.removed:
            raise ScopeError("These saved_tensors were removed; make new ones.")
        self._scope().__enter__()
        with self._counting:
            self._open += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._counting:
            if not self._open:
                raise ScopeError("These saved_tensors are left, but were not entered.")
            self._open -= 1
        self._scope().__exit__(*exc_info)

    def __repr__(self) -> str:
        return f"<SavedTensors: packed {self.packed}, unpacked {self.unpacked}>"

    def _scope(self) -> saved_tensors_hooks:
        """Return a scope of torch's; all of them are the same, and one that was kept would be a ring with this."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[bool, Any]:
        """Return what to keep of the tensor, and whether that is what the user's function made of it."""
        # torch hands an operation's own output over; kept as it is, it would keep the node that keeps it, for good.
        tensor = tensor if tensor.grad_fn is None else tensor.detach()
        if self.removed:
            return False, tensor
        with self._counting:
            self.packed += 1
        return True, self._pack_hook(tensor)

    def _unpack(self, kept: tuple[bool, Any]) -> Tensor:
        is_packed, value = kept
        if not is_packed:
            return value  # type: ignore[no-any-return]
        with self._counting:
            self.unpacked += 1
        return self._unpack_hook(value)
