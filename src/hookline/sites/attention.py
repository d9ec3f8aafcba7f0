"""Give hooks a place inside of attention: queries, keys, values, the pattern, and what each head reads, of any model.

``targets`` finds an `AttentionPart` for the roles of `PARTS` (``"role:q"``) in each attention module. It is a module
that returns what it is given, so that all that hooks do at modules they do here, in compiled code too. While one of its
parts has hooks, an attention module has a ``forward`` of its own, which lets the call of its attention function pass
through the parts: `transformers`' attention interface, by which most of its models go, or
``scaled_dot_product_attention``. Rotary embedding and grouped keys are as the model computes them.

    forward of the module ──► q(query) k(key) v(value) ──► its own function ──► z(output) ──► output projection
                                       └── pattern(softmax(q kᵀ · scale + mask)), if that has hooks

The pattern is computed beside the model's function, without dropout. Where it is edited, or its gradient is asked for,
it takes the function's place, and the output is rounded otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hookline.errors import UnhookableError
from hookline.sites.compiled import recompile_guard

__all__ = ["PARTS", "AttentionPart", "parts_of"]

PARTS: Final = ("q", "k", "v", "pattern", "z", "attn_out")
"""Queries, keys and values as the attention function gets them, (batch, heads, tokens, width); how much each token
looks at each, (batch, heads, tokens, tokens); what each head reads, (batch, heads, tokens, width); and what each adds
to the residual stream, (batch, heads, tokens, features)."""
_PARTS: Final = "_hookline_attention"
"""The attribute of an attention module, and of those in it, while a part of it has hooks."""
_INTERFACE: Final = "get_interface"


class AttentionPart(nn.Module):
    """Stand for one tensor inside of attention; `ModuleHooks` says when it has hooks."""

    is_in_path = False
    """Whether the model has to compute with it: a gradient of it is asked for."""

    def __init__(self, parts: AttentionParts) -> None:
        super().__init__()
        self._attention = weakref.ref(parts)

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def set_hooked(self, *, hooked: bool, gradients: bool) -> None:
        """Let the attention module call its parts, or not: called when the hooks of this one have changed."""
        self.is_in_path = gradients
        parts = self._attention()
        if parts is not None:
            parts.set_hooked(self, hooked=hooked)


def parts_of(module: nn.Module) -> dict[str, AttentionPart]:
    """Return the parts of an attention module by name, the same for as long as that is alive."""
    found = _KNOWN.get(module)
    if found is None:
        found = _KNOWN[module] = AttentionParts(module)
    return found.by_name


class AttentionParts:
    """The parts of one attention module, and the call in which they are."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.by_name = {name: AttentionPart(self) for name in PARTS}
        self.q, self.k, self.v, self.pattern, self.z, self.attn_out = self.by_name.values()
        self._hooked: set[AttentionPart] = set()
        self._own: Any = None
        """The ``forward`` that somebody else had given the module; copies of it have it not, while ours is there."""
        self._ours: Any = None
        self.was_reached = False
        """Whether the attention function was called in the forward that is running."""

    # -- on and off --------------------------------------------------------------------------------------------------

    def set_hooked(self, part: AttentionPart, *, hooked: bool) -> None:
        """Note that a part has hooks, or has none; the first switches all on, the last off."""
        module, had = self._module(), bool(self._hooked)
        (self._hooked.add if hooked else self._hooked.discard)(part)
        if module is not None and bool(self._hooked) is not had:
            (self._switch_off if had else self._switch_on)(module)

    def _switch_on(self, module: nn.Module) -> None:
        recompile_guard.set_own_forward(module, wanted=False)
        self._own = module.__dict__.get("forward")
        recompile_guard.bind_forward(module, _forward_with_mode if _interface_of(module) is None else _forward)
        self._ours = module.__dict__["forward"]
        for inner in module.modules():
            inner.__dict__[_PARTS] = self
        _count_interface(module, 1)

    def _switch_off(self, module: nn.Module) -> None:
        for inner in module.modules():
            inner.__dict__.pop(_PARTS, None)
        _count_interface(module, -1)
        if recompile_guard.stands_for(module.__dict__.get("forward")) is not self._ours:
            return  # somebody has put another in front, which calls ours: that does nothing any more
        recompile_guard.unbind_forward(module)
        if self._own is not None:
            module.__dict__["forward"] = self._own
        if module._forward_hooks or module._forward_pre_hooks:
            recompile_guard.set_own_forward(module, wanted=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model has no hooks of ours: its modules find no parts.
        return _no_parts, ()

    def inner_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the ``forward`` that the module would have by itself."""
        return type(module).forward(module, *args, **kwargs) if self._own is None else self._own(*args, **kwargs)

    # -- one call ----------------------------------------------------------------------------------------------------

    def attend(self, run: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Any, weigh: Any) -> Tensor:
        """Return the output of attention, (batch, heads, tokens, width), with everything through its part.

        Args:
            run: The model's own function, of query, key and value.
            tensors: These three.
            weigh: Returns the pattern, of query and key.
        """
        self.was_reached = True
        query, key, value = tensors
        query, key, value = self.q(query), self.k(key), self.v(value)
        z = run(query, key, value)
        if _has_hooks(self.pattern):
            pattern = weigh(query, key)
            edited = self.pattern(pattern)
            if edited is not pattern or self.pattern.is_in_path:
                z = edited.to(value.dtype) @ _repeated(value, query)
        read: Tensor = self.z(z)
        if _has_hooks(self.attn_out):
            self._add_up(read)
        return read

    def _add_up(self, z: Tensor) -> None:
        """Show what each head adds to the residual stream; nothing is computed with it."""
        heads = z @ _by_head(self._module(), z)  # (batch, heads, tokens, features)
        if self.attn_out(heads) is not heads:
            raise UnhookableError("What a head adds is computed beside the model; edit what it reads: role='z'.")


def _no_parts() -> None:
    return None


def _has_hooks(part: AttentionPart) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)


def _by_head(module: nn.Module | None, z: Tensor) -> Tensor:
    """Return the rows of the output projection that each head is multiplied by, (heads, width, features)."""
    heads, width = z.shape[1], z.shape[-1]
    found = None
    for inner in () if module is None else module.modules():
        weight = inner._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(inner, nn.Embedding):  # of positions
            # Of Conv1D, which GPT-2 has in place of nn.Linear, the weight is (in, out).
            rows = weight.T if isinstance(inner, nn.Linear) else weight
            found = rows if len(rows) == heads * width else found
    if found is None:
        raise UnhookableError(f"{type(module).__name__} has no matrix behind its heads ({heads} × {width} rows).")
    return found.view(heads, width, -1)


_KNOWN: Final[WeakKeyDictionary[nn.Module, AttentionParts]] = WeakKeyDictionary()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module whose function is called with the module, and so finds the parts by itself."""
    parts = getattr(module, _PARTS, None)
    if parts is None:
        return type(module).forward(module, *args, **kwargs)
    parts.was_reached = False
    output = parts.inner_forward(module, args, kwargs)
    _check_reached(parts, module)
    return output


def _forward_with_mode(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module whose function has to be noticed when torch is asked for it."""
    parts = getattr(module, _PARTS, None)
    if parts is None:
        return type(module).forward(module, *args, **kwargs)
    parts.was_reached = False
    with _Attending(parts):
        output = parts.inner_forward(module, args, kwargs)
    _check_reached(parts, module)
    return output


def _check_reached(parts: AttentionParts, module: nn.Module) -> None:
    if not parts.was_reached:
        raise UnhookableError(
            f"{type(module).__name__} computes attention by itself, so that hooks inside of it would be silent. Make "
            "the model with attn_implementation='sdpa' (of your own code: call "
            "torch.nn.functional.scaled_dot_product_attention)."
        )


# -- scaled_dot_product_attention ----------------------------------------------------------------------------------


class _Attending(TorchFunctionMode):
    """Let ``scaled_dot_product_attention`` pass through the parts while the block lasts."""

    def __init__(self, parts: AttentionParts) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(self._parts, func, *args, **(kwargs or {}))


def _attend(
    parts: AttentionParts,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)  # type: ignore[no-any-return]

    def weigh(query: Tensor, key: Tensor) -> Tensor:
        return _pattern(query, key, scale, attn_mask, is_causal=is_causal)

    return parts.attend(run, (query, key, value), weigh)


# -- the attention interface of transformers -----------------------------------------------------------------------

_USERS: Final[dict[type, int]] = {}
"""Classes of interfaces whose ``get_interface`` is ours now, with how many modules need it."""
_ORIGINAL: Final[dict[type, Any]] = {}


def _interface_of(module: nn.Module) -> type | None:
    """Return the class of the interface by which a module, or one in it, finds its attention function."""
    for inner in module.modules():
        forward = getattr(type(inner).forward, "__wrapped__", type(inner).forward)
        names = getattr(forward, "__globals__", {})
        known = names.get("ALL_ATTENTION_FUNCTIONS")
        if known is not None and _INTERFACE in forward.__code__.co_names:
            return next(kind for kind in type(known).__mro__ if _INTERFACE in vars(kind))
    return None


def _count_interface(module: nn.Module, change: int) -> None:
    """Have the interface of a module hand out functions that know parts, for as long as a module needs it."""
    kind = _interface_of(module)
    if kind is None:
        return
    count = _USERS[kind] = _USERS.get(kind, 0) + change
    if change > 0 and count == 1:
        _ORIGINAL[kind] = vars(kind)[_INTERFACE]
        setattr(kind, _INTERFACE, _handing_out(_ORIGINAL[kind]))
    elif not count:
        setattr(kind, _INTERFACE, _ORIGINAL.pop(kind))


def _handing_out(original: Any) -> Any:
    def get_interface(self: Any, implementation: Any, default: Any) -> Any:
        function = original(self, implementation, default)

        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            parts = getattr(module, _PARTS, None)
            if parts is None:
                return function(module, query, key, value, *args, **kwargs)
            return _attend_by_interface(parts, function, implementation, module, (query, key, value), args, kwargs)

        return attention

    return get_interface


def _attend_by_interface(
    parts: AttentionParts, function: Any, implementation: str, module: nn.Module, tensors: Any, args: Any, kwargs: Any
) -> Any:
    rest: Any = None

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal rest
        output, *rest = function(module, query, key, value, *args, **kwargs)
        return output.transpose(1, 2)  # type: ignore[no-any-return]  # (batch, tokens, heads, width) in all of them

    def weigh(query: Tensor, key: Tensor) -> Tensor:
        mask = args[0] if args else kwargs.get("attention_mask")
        is_causal = kwargs.get("is_causal")
        if "flash" in str(implementation) or "flex" in str(implementation):
            raise UnhookableError(
                f"The pattern cannot be computed beside {implementation}, whose mask is of another form. Make the "
                "model with attn_implementation='sdpa' or 'eager'."
            )
        return _pattern(
            query,
            key,
            kwargs.get("scaling", args[1] if len(args) > 1 else None),
            mask,
            is_causal=mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
            if is_causal is None
            else is_causal,
            bias=kwargs.get("position_bias"),
            softcap=kwargs.get("softcap"),
        )

    z = parts.attend(run, tensors, weigh)
    return (z.transpose(1, 2), *rest)


# -- the pattern ---------------------------------------------------------------------------------------------------


def _pattern(
    query: Tensor,
    key: Tensor,
    scale: float | None,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + mask), without dropout, in the dtype of the query."""
    scores = query @ _repeated(key, query).transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask[..., : scores.shape[-1]]
    elif is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype)


def _repeated(grouped: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one head for each of the query: several of these may share one."""
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], 1)
