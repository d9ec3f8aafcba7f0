"""Give a gap between trainer and engine a name: compare parameters, try known faults on the trainer, read local errors.

`parity` calls `find_cause`. A fault is named only if parameters differ, if the trainer with the same fault closes the
gap, or if one layer stands out and healing it closes the gap; all else is "unsure".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from hookline.debug.parity.scoring import HEAD, LayerError, Pair
from hookline.debug.parity.sides import EngineSide
from hookline.errors import HooklineError
from hookline.messages import listed
from hookline.sites.wrappers import unwrap

__all__ = ["Cause", "find_cause"]

_BASES: Final = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""Usual bases of rotary embeddings."""
_CLOSES: Final = 0.7
"""A fault that is imitated has to leave less than this part of the gap."""
_LOOKED_INSIDE: Final = 8
"""So many sequences are looked at inside of the worst layer."""
_TIES: Final = 0.05
"""Fewer tokens than this went to other experts: ties of the router."""
Errors = Mapping[str, LayerError]


@dataclass(frozen=True)
class Cause:
    """Where a gap comes from."""

    name: str
    """``"temperature"``, ``"tokens"``, ``"positions"``, ``"rope"``, ``"head"``, ``"weights"``, ``"experts"``,
    ``"attention"``, ``"router ties"``, ``"layer"`` or ``"unsure"``."""
    where: str
    """The module, or what else it is."""
    text: str
    """What was found, in a few words."""
    stays: float | None = None
    """The gap that stays when it is healed, or imitated in the trainer; nats rms."""


def find_cause(
    pair: Pair, engine: EngineSide, layers: Errors, before: float, tell: Callable[[str], None]
) -> tuple[Cause | None, Errors]:
    """Return the cause, None where there is nothing to tell; and the errors inside of the worst layer, if it was asked.

    Args:
        pair: The two sides.
        engine: The engine, to be asked for more states.
        layers: The local errors; empty if the engine gives no states.
        before: The gap.
        tell: Is told what begins.
    """
    inside: Errors = {}
    is_beyond = before > pair.most
    bad = _worst_first(layers)
    cause = None if engine.model is None else _other_parameters(pair, engine.model, layers)
    if cause is not None or not (is_beyond or bad):
        return cause, inside
    cause = _ties(pair, layers, bad)
    if cause is not None:
        return cause, inside
    if is_beyond or bad == [HEAD] or set(pair.trainer.blocks) <= set(bad):  # those of the head, or of every layer
        tell("causes: known faults are tried on the trainer")
        cause = _imitated(pair, before, layers)
    if cause is None and not layers:
        cause = _unsure("no known fault closes it, and the engine gives no hidden states")
    elif cause is None:
        cause, inside = _from_layers(pair, engine, layers, before, tell)
        if cause.name == "unsure" and not is_beyond:
            cause = None
        elif not is_beyond and pair.is_wide and pair.healthy is None:
            # in 16 bits a small fault of all layers stands out in one alone
            cause = _unsure("errors of layers stand out; save a healthy pair to compare with")
    return cause, inside


def _worst_first(layers: Errors) -> list[str]:
    """Return the modules with more error than expected."""
    beyond = [name for name, error in layers.items() if error.is_beyond]
    return sorted(beyond, key=lambda name: -layers[name].times)


def _head_text(layers: Errors) -> str:
    stays = f"; {layers[HEAD].found:.2g} stays when all layers are healed" if layers else ""
    return f"another dtype or other weights of the head{stays}"


def _unsure(text: str) -> Cause:
    return Cause("unsure", "unknown", text)


# -- parameters --------------------------------------------------------------------------------------------------


def _other_parameters(pair: Pair, model: torch.nn.Module, layers: Errors) -> Cause | None:
    """Return a cause if parameters of the engine's model differ from the trainer's."""
    ours = dict(pair.trainer.inner.named_parameters())
    theirs = dict(unwrap(model).named_parameters())
    differ = [name for name in ours if name in theirs and not _is_same(ours[name], theirs[name])]
    if not differ:
        return None
    if {name.rpartition(".")[0] for name in differ} == {pair.trainer.head}:
        return Cause("head", pair.trainer.head, _head_text(layers))
    blocks = {next((block for block in pair.trainer.blocks if name.startswith(f"{block}.")), None) for name in differ}
    block = blocks.pop() if len(blocks) == 1 else None
    stays = pair.healed_gap(block) if block is not None and layers else None
    where = differ[0] if len(differ) == 1 else block or f"{len(differ)} of {len(ours)} parameters"
    if all(_is_permuted(ours[name], theirs[name]) for name in differ):
        return Cause("experts", where, "experts stand in each other's place", stays)
    shown = listed([name.removeprefix(f"{block}.") for name in differ])
    return Cause("weights", where, f"stale or other weights: {shown}", stays)


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours.detach().to(theirs.device, theirs.dtype), theirs.detach())


def _is_permuted(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether both hold the matrices of the same experts, in whatever order."""
    if ours.dim() != 3 or ours.shape != theirs.shape:
        return False
    one, other = (sorted(each.detach().double().flatten(1).sum(1).tolist()) for each in (ours, theirs))
    return one == other


# -- faults that are imitated ------------------------------------------------------------------------------------


def _imitated(pair: Pair, before: float, layers: Errors) -> Cause | None:
    """Return the fault that closes the gap best when the trainer has it too; None if none closes it."""
    faults: Sequence[Callable[[Pair], Iterator[Cause]]] = (_temperature, _tokens_and_positions, _rope)
    bad = _worst_first(layers)
    if bad:
        faults = faults[1:] if any(name in pair.trainer.blocks for name in bad) else faults[:1]
    found = [cause for try_fault in faults for cause in try_fault(pair)]
    best = min(found, key=lambda cause: cause.stays or 0.0, default=None)
    enough = min(max(pair.most, 0.02 * before), _CLOSES * before)
    return best if best is not None and (best.stays or 0.0) <= enough else None


def _temperature(pair: Pair) -> Iterator[Cause]:
    own = pair.trainer.temperature
    divisor, stays = _least(lambda each: pair.gap(pair.trainer.of(temperature=each)), own / 2, own * 2)
    text = f"the engine's logits are divided by {divisor:.3g}, the trainer's by {own:.3g}"
    yield Cause("temperature", "sampling", text, stays)


def _tokens_and_positions(pair: Pair) -> Iterator[Cause]:
    bos = pair.trainer.inner.config.bos_token_id or 0
    cut = [replace(each, ids=each.ids[1:], prompt=each.prompt - 1) for each in pair.answers]
    longer = [replace(each, ids=[bos, *each.ids], prompt=each.prompt + 1) for each in pair.answers]
    seen = {"the engine has put a BOS before the prompt": longer}
    if all(len(each.logprobs) < len(each.ids) for each in cut):
        seen["the engine has not seen the first token of the prompt (BOS)"] = cut
    for text, answers in seen.items():
        yield Cause("tokens", "first token", text, pair.gap(pair.trainer, answers))
    for shift in (1, -1):
        text = f"positions of decoded tokens are off by {shift:+d} in the engine"
        yield Cause("positions", "decode", text, pair.gap(pair.trainer, shift=shift))


def _rope(pair: Pair) -> Iterator[Cause]:
    modules = pair.trainer.inner.modules()
    tables = [each.inv_freq for each in modules if isinstance(getattr(each, "inv_freq", None), Tensor)]
    base = (getattr(pair.trainer.inner.config, "rope_parameters", None) or {}).get("rope_theta")
    if not tables or not base:
        return

    kept = [table.clone() for table in tables]

    def gap(other: float) -> float:
        try:
            for table in tables:
                table.copy_(table.double().pow(math.log(other) / math.log(base)))
            return pair.gap(pair.trainer)
        finally:
            for table, old in zip(tables, kept, strict=True):
                table.copy_(old)

    start = min([base, *_BASES], key=gap)
    found, stays = _least(gap, 0.6 * start, 1.65 * start)
    yield Cause("rope", "all layers", f"RoPE has base {found:.4g} in the engine, not {base:g}", stays)


def _least(gap: Callable[[float], float], low: float, high: float, rounds: int = 14) -> tuple[float, float]:
    """Return where a function with one valley is least, and its value there, by golden section of the logarithm."""
    gap = cache(gap)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(rounds):
        left, right = (float(f"{low**part * high ** (1 - part):.9g}") for part in (golden, 1 - golden))
        low, high = (low, right) if gap(left) < gap(right) else (left, high)
    return min((left, right), key=gap), min(gap(left), gap(right))


# -- layers ------------------------------------------------------------------------------------------------------


def _ties(pair: Pair, layers: Errors, bad: Sequence[str]) -> Cause | None:
    """Return that routers chose other experts for a few tokens, if that is all that stands out, or nothing does."""
    routers = pair.trainer.roles.get("router", [])
    routed = [name for name in layers if any(router.startswith(f"{name}.") for router in routers)]
    odd = bad or [name for name in routed if layers[name].affected]
    if not odd or any(name not in routed or not 0 < layers[name].affected < _TIES for name in odd):
        return None
    stays = pair.healed_gap(max(odd, key=list(layers).index))
    if stays > pair.most:
        return None
    share = max(layers[name].affected for name in odd)
    return Cause("router ties", odd[0], f"{share:.1%} of the tokens went to other experts", stays)


def _from_layers(
    pair: Pair, engine: EngineSide, layers: Errors, before: float, tell: Callable[[str], None]
) -> tuple[Cause, Errors]:
    """Return the layer that stands out, confirmed by healing it, and the errors inside of it."""
    bad = _worst_first(layers)
    blocks = [name for name in bad if name in pair.trainer.blocks]
    if bad[:1] == [HEAD] and all(layers[HEAD].times >= 1.5 * layers[name].times for name in blocks):
        return Cause("head", pair.trainer.head, _head_text(layers), layers[HEAD].found), {}
    if not blocks:
        outer = [name for name in bad if name != HEAD]
        if not outer:
            return _unsure("no layer stands out; save a healthy pair to compare with"), {}
        return Cause("weights", outer[0], f"its outputs are {layers[outer[0]].times:.2g} x as far apart as usual"), {}
    every = len(pair.trainer.blocks)
    if 1 < every < 2 * len(blocks):
        text = f"{len(blocks)} of {every} layers are off, each by itself: RoPE, mask, or a prefix cache"
        return Cause("attention", "all layers", text), {}
    worst = blocks[0]
    place = list(layers).index(worst)
    stays = pair.healed_gap(worst)
    earlier = pair.healed_gap(list(layers)[place - 1]) if place else before
    if stays > 0.95 * earlier or (len(blocks) > 1 and stays > pair.most):
        return _unsure(f"{listed(blocks)} stand out, but healing {worst} leaves {stays:.2g} of {earlier:.2g}"), {}
    tell(f"inside of {worst}")
    inside = _inside(pair, engine, worst)
    healed = f"healing it takes the gap from {earlier:.2g} to {stays:.2g}"
    return replace(_part_of(pair, worst, inside, healed), stays=stays), inside


def _inside(pair: Pair, engine: EngineSide, block: str) -> Errors:
    """Return the errors of the modules inside of a block, given the engine's inputs of each."""
    own = [
        f"{block}.{name}"
        for name, module in pair.trainer.model.get_submodule(block).named_modules()
        if name and "experts" not in name and next(module.parameters(recurse=False), None) is not None
    ]
    sites = pair.trainer.sites
    names = [*sites[: sites.index(block)][-1:], *own, *_parts(pair, block)]
    try:
        answers = engine.rescore(pair.answers[:_LOOKED_INSIDE], names)
    except HooklineError as error:
        engine.facts["inside"] = f"{block} was not looked into: {error}"
        return {}
    errors = pair.errors(answers, pair.twin.run(answers, names=names))
    return {name: error for name, error in errors.items() if name != HEAD}


def _parts(pair: Pair, block: str) -> list[str]:
    """Return the attention and the MLP of a block."""
    roles = pair.trainer.roles
    return [name for role in ("attn", "mlp") for name in roles.get(role, []) if name.startswith(f"{block}.")]


def _part_of(pair: Pair, block: str, inside: Errors, healed: str) -> Cause:
    """Return what inside of a layer is off."""
    is_mixture = any(name.startswith(f"{block}.") for name in pair.trainer.roles.get("router", []))
    bad = [name for name in _worst_first(inside) if name.startswith(f"{block}.")]
    if not bad:
        return Cause("layer", block, healed)
    linears = [name for name in bad if not name.endswith("o_proj") and name not in _parts(pair, block)]
    if linears:
        shown = listed([name.removeprefix(f"{block}.") for name in linears])
        return Cause("weights", linears[0] if len(linears) == 1 else block, f"weights of {shown}; {healed}")
    if is_mixture and not bad[0].endswith("o_proj"):
        return Cause("experts", block, f"experts or router of {bad[0]}; {healed}")
    return Cause("attention", block, f"attention itself (RoPE, mask) or its o_proj; {healed}")
