"""Give hooks a place inside of attention: queries, keys, values, pattern, what each head reads and adds, of any model.

For the roles of `PARTS` (``"role:q"``), ``roles`` and ``targets`` give an `AttentionPart` of each attention module
(`parts_of`). It is a module that returns what it is given, so that all that hooks do at modules they do here, in
compiled code too. `ModuleHooks` tells it when its hooks come and go (`AttentionPart.set_hooked`). ``find`` reads
`hooked_parts`; ``patch``, ``specs``, ``targets`` and ``module_hooks`` ask whether a module is an `AttentionPart`.

While one of its parts has hooks, an attention module (in vLLM, the layer in it) has a ``forward`` of its own, bound by
``compiled.recompile_guard``. That file puts another one there too, for compiled code: read its head before you change
`AttentionParts._switch_on` or ``_switch_off``. The ``forward`` lets the call of its attention function pass through the
parts: the attention interface of ``transformers``, by which most of its models go, or
``scaled_dot_product_attention``. Rotary embedding and grouped keys are as the model computes them.

    forward of the module ──► q(query) k(key) v(value) ──► its own function ──► z(output) ──► output projection
                                       └── pattern(softmax(q kᵀ · scale + mask))      attn_out(z by head) ──┘

The pattern is computed beside the model's function, without dropout, and what heads add beside the projection. Where a
hook may edit one of these, or asks for its gradient, it takes the function's place: the output is rounded otherwise,
and attention has no dropout there.

The compiler traces all that runs in a call. A new part needs:

- a name in `PARTS`, and an attribute in `AttentionParts.__init__`, in the same order;
- a call in `AttentionParts.attend`, or, beside the projection, in `OutputProjection`;
- for vLLM a call in `_forward_by_token`, which does not go by ``attend``, or a refusal in `AttentionParts.set_hooked`;
- its heads in dimension 1: ``head=`` of edits (``observe.patching``) goes by that;
- its name in ``ROLES`` of tests/sites/test_attention.py, and in the docs of ``role=`` (`attach`, `capture`,
  docs/roles.md).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hookline.errors import UnhookableError
from hookline.sites.compiled import recompile_guard

PARTS: Final = ("q", "k", "v", "pattern", "z", "attn_out")
"""Queries, keys and values as the attention function gets them, (batch, heads, tokens, width); how much each token
looks at each, (batch, heads, tokens, tokens); what each head reads, (batch, heads, tokens, width); and what it adds to
the residual stream, (batch, heads, tokens, features)."""
_PARTS: Final = "_hookline_attention"
"""The attribute of an attention module, and of those in it, while a part of it has hooks."""
_OWN: Final = recompile_guard.OWN_FORWARD
_INTERFACE: Final = "get_interface"
_BY_ITSELF: Final = (
    "{} computes attention by itself, so that hooks inside of it would be silent. Make the model with "
    "attn_implementation='sdpa' (of your own code: call torch.nn.functional.scaled_dot_product_attention)."
)
_HEADS: Final = 4
"""Dimensions of (batch, heads, tokens, width)."""


class AttentionPart(nn.Module):
    """Stand for one tensor inside of attention; `ModuleHooks` says when it has hooks."""

    has_hooks = False
    """Whether it has any. The compiler of torch 2.11 cannot ask the dictionaries of hooks whether they are empty."""
    is_in_path = False
    """Whether the model has to compute with it: it may be edited, or a gradient of it is asked for."""

    def __init__(self, parts: AttentionParts) -> None:
        super().__init__()
        self.__dict__["_attention"] = parts

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def set_hooked(self, *, hooked: bool, in_path: bool) -> None:
        """Let the attention module call its parts, or not: called when the hooks of this one have changed."""
        self.is_in_path = in_path
        self.__dict__["_attention"].set_hooked(self, hooked=hooked)
        self.has_hooks = hooked


def parts_of(module: nn.Module) -> dict[str, AttentionPart]:
    """Return the parts of an attention module by name, the same ones for as long as anybody has one of them."""
    found = _KNOWN.get(module, lambda: None)()
    if found is None:
        found = AttentionParts(module)
        _KNOWN[module] = weakref.ref(found)
    return found.by_name


def hooked_parts(module: nn.Module) -> dict[str, AttentionPart]:
    """Return the parts of a module that have hooks."""
    found = module.__dict__.get(_PARTS)
    if found is None or found.module() is not module:  # those of a module around it
        return {}
    return {name: part for name, part in found.by_name.items() if part.has_hooks}


class AttentionParts:
    """The parts of one attention module, and the call in which they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.by_name = {name: AttentionPart(self) for name in PARTS}
        self.q, self.k, self.v, self.pattern, self.z, self.attn_out = self.by_name.values()
        self._give_back: Callable[[], Any] = lambda: None
        """Gives up the interface of ``transformers`` (`_count_interface`), once, also when the module is gone."""
        self.goes_by_interface = False
        """Whether the function is called with the module, and so finds the parts by itself."""
        self.calls = 0
        """How often the attention function was called; in threads at once perhaps less, and never less than once."""

    # -- on and off --------------------------------------------------------------------------------------------------

    def set_hooked(self, part: AttentionPart, *, hooked: bool) -> None:
        """Switch all on before the first part gets hooks, and off when the last one has lost its own."""
        module = self.module()
        if module is None or hooked is part.has_hooks:
            return
        if hooked and part in (self.pattern, self.attn_out) and _served_layer(module):
            raise UnhookableError("The attention of vLLM has its own kernels: q, k, v and z work, no pattern.")
        if not any(each.has_hooks for each in self.by_name.values() if each is not part):
            (self._switch_on if hooked else self._switch_off)(module)

    def _switch_on(self, module: nn.Module) -> None:
        """Bind a ``forward`` that passes attention through the parts; `recompile_guard`'s own goes away meanwhile."""
        callers = _callers_in(module)
        if any(_PARTS in inner.__dict__ for inner in callers):
            raise UnhookableError(
                f"{type(module).__name__} shares its attention with another module that has hooks inside of it."
            )
        if any(isinstance(inner, nn.MultiheadAttention) for inner in module.modules()):  # not even called at times
            raise UnhookableError(_BY_ITSELF.format("nn.MultiheadAttention"))
        layer = _served_layer(module)
        kind = next(filter(None, map(_own_interface_of, module.modules())), None) if layer is None else None
        self.goes_by_interface = kind is not None
        try:
            for inner in callers:
                inner.__dict__[_PARTS] = self
            called, forward = (module, _forward) if layer is None else (layer, _forward_by_token)
            recompile_guard.set_own_forward(called, wanted=False)
            own = called.__dict__.get("forward")
            if _OWN not in called.__dict__:  # else ours is there, below that of somebody else, which calls it
                recompile_guard.bind_forward(called, forward)
                called.__dict__[_OWN] = own
            if kind is not None:
                _count_interface(kind, 1)
                self._give_back = weakref.finalize(module, _count_interface, kind, -1)
        except BaseException:  # Ctrl-C
            self._switch_off(module)
            raise

    def _switch_off(self, module: nn.Module) -> None:
        """Take that ``forward`` away, and put back what was there before; must work after half of `_switch_on` too."""
        for inner in _callers_in(module):
            inner.__dict__.pop(_PARTS, None)
        self._give_back()
        module = _served_layer(module) or module
        ours = getattr(recompile_guard.stands_for(module.__dict__.get("forward")), "__func__", None)
        if ours not in (_forward, _forward_by_token):
            return  # somebody has put another in front, which calls ours: that does nothing any more
        own = module.__dict__.pop(_OWN, None)
        recompile_guard.unbind_forward(module)
        if own is not None:
            module.__dict__["forward"] = own
        if module._forward_hooks or module._forward_pre_hooks:
            recompile_guard.set_own_forward(module, wanted=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model has no hooks of ours: its modules find no parts.
        return type(None), ()

    # -- one call ----------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; attention goes through the parts."""
        if func is scaled_dot_product_attention:
            return _attend(self, func, *args, **kwargs)
        return _call_in_mode(func, args, kwargs)

    def attend(self, run: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Any, weigh: Any) -> Tensor:
        """Return the output of attention, (batch, heads, tokens, width), with everything through its part.

        Args:
            run: The model's own function, of query, key and value.
            tensors: These three.
            weigh: Returns the pattern, of query and key.
        """
        self.calls += 1
        query, key, value = tensors
        if query.dim() != _HEADS:
            raise UnhookableError(
                f"Hooks inside of attention are for (batch, heads, tokens, width), and here are {query.dim()} "
                "dimensions. Hook the modules around it."
            )
        # Keys and values may be those of a cache, which an edit in place is not to reach.
        key, value = (each.clone() if part.is_in_path else each for part, each in ((self.k, key), (self.v, value)))
        query, key, value = self.q(query), self.k(key), self.v(value)
        z = run(query, key, value)
        if self.pattern.has_hooks:
            pattern = self.pattern(weigh(query, key))
            if self.pattern.is_in_path:
                z = pattern.to(value.dtype) @ _repeated(value, query)
        read: Tensor = self.z(z)
        # The `OutputProjection` around knows a tensor viewed as itself for what it is to follow, in compiled code too.
        return read.view_as(read) if self.attn_out.has_hooks else read


_KNOWN: Final[weakref.WeakKeyDictionary[nn.Module, weakref.ref[AttentionParts]]] = weakref.WeakKeyDictionary()


def _callers_in(module: nn.Module) -> list[nn.Module]:
    """Return the module and those in it that may call its function; no rotary embedding, which layers may share."""
    layer = _served_layer(module)
    if layer is not None:
        return [module, layer]
    return [
        inner
        for inner in module.modules()
        if next(inner.parameters(), None) is not None or _own_interface_of(inner) is not None
    ]


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module with its attention through its parts."""
    parts = getattr(module, _PARTS, None)
    if parts is None:
        return _own_forward(module, args, kwargs)
    before = parts.calls
    projection = OutputProjection(type(module).__name__, parts.attn_out) if parts.attn_out.has_hooks else None
    following = nullcontext() if projection is None else _CallsBy(projection)
    with following, nullcontext() if parts.goes_by_interface else _CallsBy(parts):
        output = _own_forward(module, args, kwargs)
    if parts.calls == before and getattr(module, _PARTS, None) is parts:  # else the hooks have come off meanwhile
        raise UnhookableError(_BY_ITSELF.format(type(module).__name__))
    if projection is not None:
        projection.check()
    return output


def _own_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the ``forward`` that the module would have by itself."""
    own = getattr(module, _OWN, None)
    return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


# -- scaled_dot_product_attention ----------------------------------------------------------------------------------


class _CallsBy(TorchFunctionMode):
    """Have an object call all functions of torch while the block lasts, by its ``call``."""

    def __init__(self, caller: AttentionParts | OutputProjection) -> None:
        super().__init__()
        self._caller = caller

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._caller.call(func, args, kwargs or {})


def _call_in_mode(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that a mode was given."""
    if func is Tensor.unflatten:  # which the compiler cannot call by this name in a mode
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


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

_USERS: Final[Counter[type]] = Counter()
"""How many modules need the ``get_interface`` of a class of interfaces to be ours."""
_REPLACED: Final[dict[type, tuple[Any, Any]]] = {}
"""The ``get_interface`` that a class had, and ours, for as long as that is needed."""


def _own_interface_of(module: nn.Module) -> type | None:
    """Return the class of the interface by which a module finds its attention function, if it has one."""
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    known = getattr(forward, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS")
    if known is None or _INTERFACE not in forward.__code__.co_names:
        return None
    return next(kind for kind in type(known).__mro__ if _INTERFACE in vars(kind))


def _count_interface(kind: type, change: int) -> None:
    """Have an interface hand out functions that know parts, for as long as a module needs it."""
    _USERS[kind] += change
    if change > 0 and kind not in _REPLACED:
        original = vars(kind)[_INTERFACE]
        _REPLACED[kind] = original, _handing_out(original)
        setattr(kind, _INTERFACE, _REPLACED[kind][1])
    elif not _USERS[kind]:
        original, ours = _REPLACED.pop(kind)
        if vars(kind).get(_INTERFACE) is ours:  # else somebody has put another in front, which calls ours
            setattr(kind, _INTERFACE, original)


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
        if "flash" in str(implementation) or "flex" in str(implementation):
            raise UnhookableError(
                f"The pattern cannot be computed beside {implementation}, whose mask is of another form. Make the "
                "model with attn_implementation='sdpa' or 'eager'."
            )
        if kwargs.get("s_aux") is not None:
            raise UnhookableError("This model has attention sinks, for which there is no pattern; q, k, v and z work.")
        mask = args[0] if args else kwargs.get("attention_mask")
        scale = kwargs.get("scaling", args[1] if len(args) > 1 else None)
        is_causal = kwargs.get("is_causal")
        if implementation == "eager" or mask is not None or query.shape[2] < 2:
            is_causal = False
        elif is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        bias, softcap = kwargs.get("position_bias"), kwargs.get("softcap")
        return _pattern(query, key, scale, mask, is_causal=is_causal, bias=bias, softcap=softcap)

    z = parts.attend(run, tensors, weigh)
    return (z.transpose(1, 2), *rest)


# -- vLLM ----------------------------------------------------------------------------------------------------------


def _served_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer of vLLM that an attention module calls with queries, keys and values; None elsewhere."""
    names = ("num_heads", "num_kv_heads", "head_size", "kv_cache_dtype")
    return next((inner for inner in module.modules() if all(hasattr(inner, name) for name in names)), None)


def _forward_by_token(layer: Any, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of vLLM's layer with all through its parts, (tokens, heads, width): requests have no batch."""
    parts = getattr(layer, _PARTS, None)
    if parts is None:
        return _own_forward(layer, (query, key, value, *args), kwargs)

    def through(part: AttentionPart, tensor: Any, heads: int) -> Any:
        if tensor is None:  # of a layer that uses the keys of another
            return None
        return part(tensor.reshape(len(tensor), heads, -1)).reshape(tensor.shape)

    query = through(parts.q, query, layer.num_heads)
    key = through(parts.k, key, layer.num_kv_heads)
    value = through(parts.v, value, layer.num_kv_heads)
    return through(parts.z, _own_forward(layer, (query, key, value, *args), kwargs), layer.num_heads)


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
    # A token that may look at nothing, as padding on the left, looks at nothing: no NaN.
    sees_nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1, dtype=torch.float32).masked_fill(sees_nothing, 0).to(query.dtype)


def _repeated(grouped: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one head for each of the query: several of these may share one."""
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], 1)


# -- what each head adds -------------------------------------------------------------------------------------------
# It is what the head reads, times its rows of the output projection. The tensor that the heads read is followed through
# functions that move its numbers and change none (``transpose``, ``reshape``) up to the first product with a matrix,
# which is that projection, whatever it is called and wherever it lies. A model that does anything else with it in
# between (a gate, an adapter beside the matrix, a quantized matrix) is an error.

_Order = tuple[int, ...]
_FLAT: Final[_Order] = ()
"""The order of a tensor whose last dimension is heads × width, and whose rows are batch × tokens."""
_BY_TOKEN: Final[_Order] = (0, 2, 1, 3)
"""Of (batch, tokens, heads, width), in which the last two can be made one."""
_SAME: Final = (Tensor.contiguous, Tensor.clone, Tensor.to, Tensor.type_as, torch.clone)
_SWAPS: Final = (Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims)
_PERMUTES: Final = (Tensor.permute, torch.permute)
_RESHAPES: Final = (Tensor.reshape, torch.reshape, Tensor.view, Tensor.flatten, torch.flatten)
_PRODUCTS: Final = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class OutputProjection:
    """Find the matrix behind the heads in one forward of an attention module, and what each head adds by it."""

    def __init__(self, module_name: str, part: Any) -> None:
        self._name = module_name
        self._part = part
        """The `AttentionPart` that is shown what heads add."""
        self._z: Any = None
        self._followed: list[tuple[Tensor, _Order]] = []
        """What became of that tensor, each with where its dimensions are in (batch, heads, tokens, width)."""
        self._was_seen = False
        self._fault = ""
        """What the model does with the heads after which one head cannot be told from the others. It is raised when the
        forward is over: torch would take an error raised inside of an operator for one about types."""

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function; note what becomes of the tensor that is followed."""
        if func is Tensor.view_as and args[1:] and args[0] is args[1]:  # at the end of `AttentionParts.attend`
            self._z, self._followed, self._was_seen = args[0], [(args[0], (0, 1, 2, 3))], False
            return args[0]
        found = [each for each in self._followed if any(each[0] is given for given in (*args, *kwargs.values()))]
        if not found:
            return _call_in_mode(func, args, kwargs)
        tensor, order = found[0]
        product = _product(func, args, kwargs)
        if product is not None and product[0] is tensor and order == _FLAT:
            return self._projected(func, args, kwargs, *product[1:])
        output = _call_in_mode(func, args, kwargs)
        if isinstance(output, Tensor):
            moved = self._moved(func, args, tensor, order, output)
            if moved is None:
                self._fault = f"computes with it ({getattr(func, '__name__', func)}) beside its output projection"
            else:
                self._followed.append((output, moved))
        return output

    def check(self) -> None:
        """Raise if the forward is over, and what each head adds is not known."""
        fault = self._fault or ("" if self._was_seen else "was not seen to multiply it by an output projection")
        if fault and self._part.has_hooks:
            raise UnhookableError(
                f"What each head adds is what it reads times a matrix, and {self._name} {fault}. Capture role='z'."
            )

    def _moved(self, func: Any, args: Any, tensor: Tensor, order: _Order, output: Tensor) -> _Order | None:
        """Return the order of dimensions after a function; None if it does more than to move numbers."""
        if func in _SAME or (func in _RESHAPES and output.shape == tensor.shape):
            return order
        if func in _SWAPS and order != _FLAT and len(args) == 3:
            moved = list(order)
            moved[args[1]], moved[args[2]] = moved[args[2]], moved[args[1]]
            return tuple(moved)
        if func in _PERMUTES and order != _FLAT and len(args) > 1:
            dims = args[1] if isinstance(args[1], tuple | list) else args[1:]
            return tuple(order[dim] for dim in dims)
        is_whole = output.shape[-1] == self._z.shape[1] * self._z.shape[3]
        return _FLAT if func in _RESHAPES and order in (_BY_TOKEN, _FLAT) and is_whole else None

    def _projected(self, func: Any, args: Any, kwargs: dict[str, Any], matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the projection; show what each head adds to it."""
        if self._was_seen:
            self._fault = "multiplies it by several, as those of an adapter: merge it (PEFT: model.merge_adapter())"
            return _call_in_mode(func, args, kwargs)  # type: ignore[no-any-return]
        self._was_seen = True
        rows = matrix.reshape(self._z.shape[1], self._z.shape[3], -1)
        added: Tensor = self._part(torch.einsum("bhtw,hwf->bhtf", self._z.to(matrix.dtype), rows))
        output: Tensor = _call_in_mode(func, args, kwargs)
        if not self._part.is_in_path:
            return output
        total = added.sum(1) if bias is None else added.sum(1) + bias
        return total.reshape(output.shape).to(output.dtype)


def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return what a function multiplies by a matrix (in, out), that, and what it adds; None if it does not do that."""
    if func is linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"].T, given.get("bias")
    if func is torch.addmm and len(args) == 3 and not kwargs:  # Conv1D of GPT-2
        return args[1], args[2], args[0]
    if func in _PRODUCTS and len(args) == 2 and args[1].dim() == 2:
        return args[0], args[1], None
    return None
