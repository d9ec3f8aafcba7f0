"""Find the parts of a language model by what they do: residual stream, attention, MLP, embedding, norm, head, router.

``targets`` calls `modules_in_role` for a target such as ``"role:resid"``, and `Cache` (``capture``) for
``cache["resid", 3]``. Users, ``debug.parity``, ``observe.index`` and an error of ``targets`` call `find_roles` for all
of them. ``attach``, ``find``, ``capture``, ``patch`` and ``watch`` make a target of ``role=`` and ``layer=`` by
`with_role`. The parts of an attention module come from ``attention``. No table of model families is used: the answer
comes from which lists, matrices and shapes a model has, and from the few words that all libraries share (``attn``,
``mlp``, ``expert``).

For a model with other words, add these to one of the regular expressions below, or to `_HEADS`, `_ALL_EXPERTS` or
`_ADAPTED`, with a model in tests/sites/test_roles.py. The names of roles are public, and ``observe.index`` and
``debug.parity`` ask for some of them: rename none. `ROLES` says what a new role needs. A place inside of attention is
called ``module:role`` (``"layers.3.self_attn:q"``); ``targets`` takes that apart again, by the roles in `PARTS`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import NoMatchError, TargetError
from hookline.messages import suggest
from hookline.sites.attention import PARTS, parts_of
from hookline.sites.wrappers import walk

ROLE: Final = "role:"
"""What a target begins with that names a role."""
ROLES: Final = ("resid", "attn", "mlp", "embed", "final_norm", "unembed", "router")
"""Output of a block; attention and MLP inside it; embedding of the tokens; norm after the last block; logits; choice of
experts. Tensors inside of attention have the roles of `PARTS`: the head of ``attention`` says what a new one needs.
A new role here needs an entry in `_roles` too, and one in `IN_BLOCKS` if each block may have it; in
``observe.index._BY_TOKEN`` if its output has a row for each token; a word in the docstrings of `find_roles`, and of
``role:`` in `attach` and `capture`; a row in docs/roles.md; and a test in tests/sites/test_roles.py."""
IN_BLOCKS: Final = ("resid", "attn", "mlp", "router", *PARTS)
"""Roles that each block may have, and so a number."""
# What `role_target` writes: "role:mlp", "role:mlp.3", "role:mlp.0:4".
_TARGET: Final = re.compile(r"role:(?P<role>[^.]*)(\.(?P<first>-?\d+)|\.(?P<start>-?\d*):(?P<stop>-?\d*))?")
Named: TypeAlias = tuple[str, nn.Module]
Layers: TypeAlias = int | slice | Sequence[int] | None
"""Numbers of blocks: one, negative ones from the end, a list, a slice; None for all."""

_ATTENTION: Final = re.compile(r"attn|attention", re.IGNORECASE)
_CROSS: Final = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
_OTHER_MIXER: Final = re.compile(r"mamba|mixer|ssm|recurrent|temporal|short_?conv", re.IGNORECASE)
_MLP: Final = re.compile(r"mlp|ffn|feed_?forward|moe|(^|_)ff($|_)", re.IGNORECASE)
_EXPERTS: Final = re.compile(r"expert|moe", re.IGNORECASE)
_NORM: Final = re.compile(r"norm", re.IGNORECASE)
_BEFORE_BLOCKS: Final = re.compile(r"emb(?!.*after)|(^|_)pre", re.IGNORECASE)
"""A norm of the embedding; not ESM's ``emb_layer_norm_after``, which comes after the blocks."""
_NO_TOKENS: Final = re.compile(r"pos|type|segment|rotary|relative", re.IGNORECASE)
_HEADS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_EXPERT_PARAMETER: Final = 3
"""Dimensions of a parameter that holds the matrices of all experts."""
_ALL_EXPERTS: Final = ("global_num_experts", "num_experts")
"""Where vLLM and SGLang say how many experts there are on all ranks, of which one may hold a few."""
_ADAPTED: Final = ("base_layer", "original_module")
"""Under which names an adapter (PEFT, vLLM) keeps the layer in whose place it is called."""


def with_role(target: Any, role: str | None, unset: Any = None, *, layer: Layers = None) -> Any:
    """Return ``target``, or, if there is a ``role``, the target that means it in the blocks ``layer``; raise for both.

    ``unset`` is the value of a target that was not given.

    >>> with_role(None, "mlp", layer=-1)
    'role:mlp.-1'
    """
    if role is None:
        if layer is not None:
            raise TargetError(f"layer={layer!r} goes with a role: role='resid', layer={layer!r}.")
        return target
    if target is not unset and target != unset:
        raise TargetError(f"A target and role={role!r} were given: leave one out, or list both: [target, '{ROLE}…'].")
    if isinstance(layer, Iterable) and not isinstance(layer, str):
        return [role_target(role, each) for each in layer]
    return role_target(role, layer)


def role_target(role: str, layer: int | slice | None = None) -> str:
    """Return the target that means ``role``, in the blocks ``layer`` or in all; raise if there is no such role."""
    if isinstance(layer, slice):
        if layer.step not in (None, 1):
            raise TargetError(f"layer= takes slices without a step; give a list: layer=range(…), got {layer!r}.")
        start, stop = ("" if end is None else end for end in (layer.start, layer.stop))
        found = f"{ROLE}{role}.{start}:{stop}"
    elif layer is None:
        found = f"{ROLE}{role}"
    elif isinstance(layer, Integral) and not isinstance(layer, bool):  # NumPy's too
        found = f"{ROLE}{role}.{layer}"
    else:
        raise TargetError(f"layer= is the number of a block, a list of such, or a slice; got {layer!r}.")
    _parsed(found)
    return found


def _parsed(target: str) -> tuple[str, int | slice | None]:
    """Return the role that a target names, and its blocks; raise if there is no such role, or it has no blocks."""
    match = _TARGET.fullmatch(target)
    role = target.removeprefix(ROLE) if match is None else match["role"]
    known = (*ROLES, *PARTS)
    if match is None or role not in known:
        asked = "The role 'head' is called 'unembed'. " if role == "head" else ""
        raise TargetError(
            f"There is no role {role!r}{suggest(role, known) or '.'} {asked}Roles are {', '.join(known)}."
        )
    if match["first"] is not None:
        layers: int | slice | None = int(match["first"])
    elif match["start"] is not None:
        layers = slice(*(int(end) if end else None for end in (match["start"], match["stop"])))
    else:
        return role, None
    if role not in IN_BLOCKS:
        raise TargetError(f"{role!r} is outside of the blocks, and has no number: write '{ROLE}{role}'.")
    return role, layers


def find_roles(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the modules in each role that was found, in the model's order.

    Recipe::

        hookline.sites.find_roles(model)  # {"resid": ["model.layers.0", …], "attn": ["model.layers.0.self_attn", …], …}
        hookline.capture(model, "role:resid")

    ``resid`` are the blocks, whose output is the residual stream; ``attn`` and ``mlp`` the parts of each that are added
    to it; ``embed`` the embedding of the tokens; ``final_norm`` the norm that is given the output of the last block;
    ``unembed`` what returns the logits; ``router`` what chooses experts. A role that no module has is left out.
    Cross-attention has no role.
    """
    found = _roles(model)
    return {role: [name for name, _ in found[role]] for role in ROLES if found[role]}


def modules_in_role(model: nn.Module, target: str) -> list[Named]:
    """Return the modules that ``target`` (``"role:resid"``, ``"role:mlp.3"``) means; raise if there is no such role.

    Of a role inside of attention they are no modules of the model: `AttentionPart`, called ``"layers.3.self_attn:q"``.
    """
    role, layers = _parsed(target)
    found = _roles(model)
    members = found["attn" if role in PARTS else role]
    if layers is not None:
        members = _in_blocks(members, [name for name, _ in found["resid"]], layers)
    if role in PARTS:
        return [(f"{name}:{role}", parts_of(module)[role]) for name, module in members]
    return members


def _in_blocks(members: list[Named], blocks: list[str], layers: int | slice) -> list[Named]:
    """Return the members that are, or are in, some of the blocks."""
    try:
        chosen = blocks[layers] if isinstance(layers, slice) else [blocks[layers]]
    except IndexError:
        raise NoMatchError(f"There is no block {layers}: this model has {len(blocks)}, from 0 on.") from None
    # The dot lets a block count as in itself.
    return [(name, module) for name, module in members if any(_is_below(f"{name}.", each) for each in chosen)]


def _roles(model: nn.Module) -> dict[str, list[Named]]:
    """Return the modules in each role; none in any, where no blocks are found."""
    tree = _Tree(model)
    stacks = _stacks(tree)
    blocks = [block for stack in stacks for block in tree.blocks(stack)]
    parts = [_attention_and_mlp(tree, block) for block in blocks]
    outside = [name for name in tree.holders if not any(_is_below(name, stack) for stack in stacks)]
    embed = _embeddings(tree, outside)
    if not stacks and embed:  # no attention: a state space model, say
        blocks = _blocks_without_attention(tree)
        stacks = [blocks[0].rpartition(".")[0]] if blocks else []
        outside = [name for name in outside if not any(_is_below(name, block) for block in blocks)]
    if not blocks:
        return {role: [] for role in ROLES}
    heads = _heads(tree, outside, embed)
    by_role: dict[str, Iterable[str | None]] = {
        "resid": blocks,
        "attn": [attention for attention, _ in parts],
        "mlp": [mlp for _, mlp in parts],
        "embed": embed,
        "final_norm": [_final_norm(tree, stack, heads) for stack in stacks],
        "unembed": heads,
        "router": [_router(tree, mlp) for _, mlp in parts if mlp is not None],
    }
    return {role: tree.named(names) for role, names in by_role.items()}


def _is_below(name: str, above: str) -> bool:
    return not above or name.startswith(f"{above}.")


class _Tree:
    """Hold the modules of a model by their clean names, and which of them have matrices of their own.

    A layer with an adapter, as LoRA, is one module: it is called in the place of the layer, and returns the sum.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.children: defaultdict[str, list[str]] = defaultdict(list)
        """The names of the children of each module."""
        left_out: set[str] = set()
        for name, module, inner in walk(model):
            above = name.rpartition(".")[0]
            if name and above in left_out:
                left_out.add(name)
            elif inner is None and name not in self.modules:
                self.modules[name] = module
                if name:
                    self.children[above].append(name)
                if _is_adapted(module):
                    left_out.add(name)
        self.holders = [name for name, module in self.modules.items() if _has_matrix(_core(module))]
        self.holders_in: defaultdict[str, list[str]] = defaultdict(list)
        """The modules with matrices, from each one on down."""
        for holder in self.holders:
            for above in _and_above(holder):
                self.holders_in[above].append(holder)
        self.lists = [name for name, each in self.modules.items() if isinstance(each, nn.ModuleList | nn.Sequential)]

    def inside(self, name: str) -> Iterator[str]:
        """Yield all modules below ``name``, parents first."""
        for child in self.children[name]:
            yield child
            yield from self.inside(child)

    def blocks(self, stack: str) -> list[str]:
        """Return the children of a list that hold matrices; a rank of a pipeline has empty ones too."""
        return [child for child in self.children[stack] if self.holders_in[child]]

    def named(self, names: Iterable[str | None]) -> list[Named]:
        """Return names with their modules, each module once."""
        found: dict[int, Named] = {}
        for name in names:
            if name is not None:
                found.setdefault(id(self.modules[name]), (name, self.modules[name]))
        return list(found.values())

    def words(self, name: str) -> str:
        """Return the last part of a name and the class of the module, in which its purpose is written."""
        return f"{self.key(name)} {type(self.modules[name]).__name__}"

    def is_embedding(self, name: str) -> bool:
        """Return whether a module looks up rows of its matrix."""
        return "Embedding" in type(_core(self.modules[name])).__name__

    def key(self, name: str) -> str:
        """Return the last part of a name."""
        return name.rpartition(".")[2]

    def innermost(self, name: str, holders: list[str]) -> str:
        """Return the smallest module from ``name`` on down that has all of ``holders`` in it."""
        while name not in holders:
            inner = [child for child in self.children[name] if set(holders) <= set(self.holders_in[child])]
            if not inner:
                break
            name = inner[0]
        return name


def _and_above(name: str) -> Iterator[str]:
    """Yield a name and the names of all modules above it, the model's own (empty) last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _core(module: nn.Module) -> nn.Module:
    """Return the layer in whose place an adapter is called; a module without one is that itself."""
    inner = next((module._modules[key] for key in _ADAPTED if module._modules.get(key) is not None), None)
    return module if inner is None else _core(inner)


def _is_adapted(module: nn.Module) -> bool:
    """Return whether a module is an adapter around one layer; False for one around a part that has layers in it."""
    core = _core(module)
    return core is not module and (_has_matrix(core) or not core._modules)


def _has_matrix(module: nn.Module) -> bool:
    # A quantized or partitioned linear layer may have parameters of other shapes, and says by its class what it is.
    return any(each.dim() >= 2 for each in _made(module).values()) or "Linear" in type(module).__name__


def _made(module: nn.Module) -> dict[str, Tensor]:
    """Return the own parameters of a module, without those that are lazy and have no shape yet."""
    return {name: each for name, each in module._parameters.items() if each is not None and not is_lazy(each)}


# -- blocks --------------------------------------------------------------------------------------------------------


def _stacks(tree: _Tree) -> list[str]:
    """Return the innermost lists whose elements have both attention and an MLP; an encoder-decoder has two."""
    found = [name for name in tree.lists if any(all(_attention_and_mlp(tree, block)) for block in tree.blocks(name))]
    return [name for name in found if not any(other != name and _is_below(other, name) for other in found)]


def _blocks_without_attention(tree: _Tree) -> list[str]:
    """Return the elements of the first list whose elements are of one class, and hold several matrices each."""
    for name in tree.lists:
        blocks = tree.blocks(name)
        is_uniform = len({type(tree.modules[block]) for block in blocks}) == 1
        if is_uniform and all(len(tree.holders_in[block]) > 1 for block in blocks):
            return blocks
    return []


def _attention_and_mlp(tree: _Tree, block: str) -> tuple[str | None, str | None]:
    """Return the names of attention and MLP inside one block, None for one that it has not."""
    mixers = [name for name in tree.inside(block) if tree.holders_in[name] and _mixes_tokens(tree, name)]
    attention = next((name for name in mixers if _is_attention(tree, name)), None)
    rest = [
        name
        for name in tree.holders_in[block]
        if not any(name == mixer or _is_below(name, mixer) for mixer in mixers) and not tree.is_embedding(name)
    ]
    mlp = _mlp(tree, block, rest) if rest else None
    return attention and tree.innermost(attention, tree.holders_in[attention]), mlp


def _is_attention(tree: _Tree, name: str) -> bool:
    words, module = tree.words(name), tree.modules[name]
    if _CROSS.search(words) or _MLP.search(tree.key(name)):  # a class may be called Qwen2MoeAttention
        return False
    return bool(_ATTENTION.search(words)) or any(isinstance(getattr(module, key, None), int) for key in _HEADS)


def _mixes_tokens(tree: _Tree, name: str) -> bool:
    """Return whether a module carries information from token to token: attention, or what stands in its place."""
    is_called_so = _ATTENTION.search(tree.words(name)) or _OTHER_MIXER.search(tree.key(name))
    return (bool(is_called_so) and not _MLP.search(tree.key(name))) or _is_attention(tree, name)


def _mlp(tree: _Tree, block: str, holders: list[str]) -> str:
    """Return the module inside the block that has all of ``holders``, the matrices of the MLP; else the last of these.

    OPT has ``fc1`` and ``fc2`` in the block itself, BERT ``intermediate.dense`` and ``output.dense``: the output of the
    last is what is added to the residual stream.
    """
    found = tree.innermost(block, holders)
    if found != block:
        return found
    called = [child for child in tree.children[block] if _MLP.search(tree.words(child)) and child not in holders]
    for child in called:
        inner = [name for name in holders if _is_below(name, child)]
        if inner:
            return tree.innermost(child, inner)
    return holders[-1]


# -- experts -------------------------------------------------------------------------------------------------------


def _router(tree: _Tree, mlp: str) -> str | None:
    """Return the module of an MLP whose matrix has a row for each expert; None if it has none."""
    for name in tree.inside(mlp):
        count = _expert_count(tree, name)
        if count:
            return next((each for each in tree.holders_in[mlp] if _routes(tree, each, name, count)), None)
    return None


def _expert_count(tree: _Tree, name: str) -> int:
    """Return how many experts ``name`` holds; 0 if it holds none."""
    module = _core(tree.modules[name])
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(tree.blocks(name)) if _EXPERTS.search(tree.words(name)) and len(module) > 1 else 0
    sizes = [len(each) for each in _made(module).values() if each.dim() == _EXPERT_PARAMETER]
    told = [getattr(module, key, None) for key in _ALL_EXPERTS] if sizes else []
    return next((count for count in told if isinstance(count, int)), max(sizes, default=0))


def _routes(tree: _Tree, name: str, experts: str, count: int) -> bool:
    """Return whether a module outside of the experts has a matrix with ``count`` rows, one for each expert."""
    weight = _weight(tree, name)
    is_outside = name != experts and not _is_below(name, experts)
    return is_outside and weight is not None and weight.dim() == 2 and len(weight) == count


# -- outside of the blocks -----------------------------------------------------------------------------------------


def _embeddings(tree: _Tree, outside: list[str]) -> list[str]:
    """Return the embeddings of tokens: the first, and those that share its matrix, as an encoder and a decoder do."""
    words = [name for name in outside if tree.is_embedding(name) and not _NO_TOKENS.search(name)]
    if not words:
        return []
    first = _weight(tree, words[0])
    same = [name for name in words if _weight(tree, name) is first]
    deepest = max(name.count(".") for name in same)
    return [name for name in same if name.count(".") == deepest]  # T5's ``shared`` is called under two other names


def _final_norm(tree: _Tree, stack: str, heads: list[str]) -> str | None:
    """Return the norm beside a list of blocks, or above it if no matrix is in between; None if there is none.

    BERT's blocks end with a norm of their own, and the one of its head comes after a matrix. The order of modules says
    little: OPT has its last norm before its blocks.
    """
    for above in [*_and_above(stack)][1:]:
        beside = [name for name in tree.children[above] if name != stack and not _is_below(stack, name)]
        matrices = [name for each in beside for name in tree.holders_in[each]]
        norms = [name for name in beside if _NORM.search(tree.words(name)) and not tree.children[name]]
        found = [name for name in norms if name not in matrices and not _BEFORE_BLOCKS.search(tree.key(name))]
        is_plain = all(name in heads or tree.is_embedding(name) for name in matrices)
        if found and (is_plain or above == stack.rpartition(".")[0]):
            return found[-1]
        if not is_plain:
            break
    return None


def _heads(tree: _Tree, outside: list[str], embed: list[str]) -> list[str]:
    """Return the module that gives out the logits: the last with a row for each token in its matrix, or for each label.

    In vLLM and SGLang nobody calls the matrix: a ``LogitsProcessor`` does the product, and is called.
    """
    called = [name for name, module in tree.modules.items() if type(_core(module)).__name__ == "LogitsProcessor"]
    if called:
        return called[-1:]
    matrices = [
        (name, weight)
        for name in outside
        if not tree.is_embedding(name) and (weight := _weight(tree, name)) is not None
    ]
    table = _weight(tree, embed[0]) if embed else None
    rows, width = (-1, -1) if table is None else (len(table), table.shape[-1])
    found = [name for name, weight in matrices if len(weight) == rows]
    labels = [name for name, weight in matrices if weight.dim() == 2 and weight.shape[-1] == width != len(weight)]
    return found[-1:] or labels[-1:]


def _weight(tree: _Tree, name: str) -> Tensor | None:
    """Return the ``weight`` of a module, or of the layer inside its adapter; None if it has none."""
    return _made(_core(tree.modules[name])).get("weight")
