"""Give a gap between trainer and engine a name: compare parameters, try known faults on the trainer, read local errors.

`parity` calls `find_cause`. A fault is named only if imitating it in the trainer closes the gap, if parameters differ,
or if one layer stands out and healing it closes the gap; all else is "unsure".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from hookline.debug.parity.layers import HEAD, LayerErrors, Precision, healed_gap, measure_layers
from hookline.debug.parity.scoring import Answer, Scorer, rms
from hookline.debug.parity.sides import EngineSide
from hookline.messages import listed
from hookline.sites.attach import attach
from hookline.sites.roles import find_roles
from hookline.sites.wrappers import unwrap

__all__ = ["Case", "Cause", "find_cause"]

_BASES: Final = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""Usual bases of rotary embeddings."""
_CLOSES: Final = 0.7
"""A fault that is imitated has to leave less than this part of the gap."""
_LOOKED_INSIDE: Final = 8
"""So many sequences are looked at inside of the worst layer."""
_TIES: Final = 0.05
"""Fewer tokens than this went to other experts: ties of the router."""


@dataclass(frozen=True)
class Cause:
    """Where a gap comes from."""

    name: str
    """``"temperature"``, ``"tokens"``, ``"positions"``, ``"rope"``, ``"head"``, ``"weights"``, ``"experts"``,
    ``"attention"``, ``"router ties"``, ``"layer"``, ``"decode"`` or ``"unsure"``."""
    where: str
    """The module, or what else it is."""
    text: str
    """What was found, in a few words."""
    stays: float | None = None
    """The gap that stays when it is healed, or imitated in the trainer; nats rms."""

    def to_json(self) -> dict[str, Any]:
        """Return the cause as plain values."""
        return asdict(self)


_Fault = Callable[["Case"], Iterator[Cause]]


@dataclass
class Case:
    """All that is known of a pair, for `find_cause`."""

    trainer: Scorer
    twin: Scorer
    reference: Scorer
    engine: EngineSide
    answers: Sequence[Answer]
    """The sequences that are looked at, with the engine's states if it gives any."""
    yardstick: float
    limits: Precision
    temperature: float = 1.0
    """What the trainer divides logits by."""
    bos: int | None = None
    healthy: Mapping[str, float] | None = None
    progress: Callable[[str], None] = lambda text: None

    def gap(self, scores: Sequence[Tensor], answers: Sequence[Answer] | None = None) -> float:
        """Return how far scores of the trainer are from the engine's log-probs."""
        kept = self.answers if answers is None else answers
        return rms([answer.logprobs - score for answer, score in zip(kept, scores, strict=True)])


def find_cause(case: Case) -> tuple[Cause | None, LayerErrors | None, LayerErrors | None]:
    """Return the cause, the errors of layers, and those inside of the worst; None where there is nothing to tell."""
    before = case.gap(case.trainer.score(case.answers, temperature=case.temperature))
    is_beyond = before > case.limits.gap * case.yardstick
    layers = inside = None
    if all(answer.states for answer in case.answers):
        case.progress("layers: the engine's hidden states in the trainer")
        sides = case.trainer, case.twin, case.reference
        layers = measure_layers(*sides, case.answers, case.trainer.sites, case.limits, case.healthy)
    cause = _other_parameters(case, layers)
    if cause is None and is_beyond:
        cause = _imitated(case, _possible(case, layers), before)
    if cause is None and layers is not None and (is_beyond or layers.bad):
        cause, inside = _from_layers(case, layers, before)
    elif cause is None and is_beyond:
        cause = Cause("unsure", "unknown", "no known fault closes it, and the engine gives no hidden states")
    if cause is not None and cause.name == "unsure" and not is_beyond:
        cause = None
    return cause, layers, inside


def _possible(case: Case, layers: LayerErrors | None) -> Sequence[_Fault]:
    """Return the known faults that go with the errors of layers."""
    every = (_temperature, _head, _beginning, _positions, _rope)
    if layers is None or not layers.bad:
        return every
    blocks = [name for name in layers.bad if name in case.trainer.blocks]
    return every[2:] if blocks else every[:2]


# -- parameters --------------------------------------------------------------------------------------------------


def _other_parameters(case: Case, layers: LayerErrors | None) -> Cause | None:
    """Return a cause if the engine's model is in this process, and parameters differ from the trainer's."""
    if case.engine.model is None:
        return None
    ours = dict(case.trainer.inner.named_parameters())
    theirs = dict(unwrap(case.engine.model).named_parameters())
    if set(ours) - set(theirs):
        return None
    differ = [name for name, weight in ours.items() if not _is_same(weight, theirs[name])]
    if not differ:
        return None
    stays = None
    blocks = {_block_of(case, name) for name in differ}
    block = next(iter(blocks)) if len(blocks) == 1 else None
    if block is not None and layers is not None and block in layers.found:
        stays = healed_gap(case.trainer, case.answers, block)
    if len(differ) == 1:
        (name,) = differ
        swapped = _swapped(ours[name], theirs[name])
        if swapped:
            return Cause("experts", name, f"experts {listed(swapped)} stand in each other's place", stays)
        lower = _lower_precision(ours[name], theirs[name])
        if lower is not None:
            what = "head" if name.startswith(f"{case.trainer.head}.") else "weights"
            where = case.trainer.head if what == "head" else name
            text = f"{name} is the trainer's rounded to {lower}"
            if layers is not None and what == "head":
                stays = layers.found[HEAD]
                text += f"; {stays:.2g} stays when all layers are healed"
            return Cause(what, where, text, stays)
    if all(_swapped(ours[name], theirs[name]) for name in differ):
        which = _swapped(ours[differ[0]], theirs[differ[0]])
        return Cause("experts", block or "", f"experts {listed(which)} stand in each other's place", stays)
    where = differ[0] if len(differ) == 1 else block or f"{len(differ)} of {len(ours)} parameters"
    shown = [name.removeprefix(f"{block}.") for name in differ]
    return Cause("weights", where, f"stale or other weights: {listed(shown)}", stays)


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    return torch.equal(ours.detach().to(theirs.device, theirs.dtype), theirs.detach())


def _block_of(case: Case, name: str) -> str | None:
    return next((block for block in case.trainer.blocks if name.startswith(f"{block}.")), None)


def _swapped(ours: Tensor, theirs: Tensor) -> list[str]:
    """Return the numbers of the experts whose matrices are those of others; nothing if they are no experts' at all."""
    if ours.dim() != 3 or ours.shape != theirs.shape:
        return []
    mine, others = (each.detach().double().flatten(1).sum(1).tolist() for each in (ours, theirs))
    wrong = [number for number, value in enumerate(others) if value != mine[number]]
    return [str(number) for number in wrong] if sorted(mine) == sorted(others) else []


def _lower_precision(ours: Tensor, theirs: Tensor) -> str | None:
    for name, rounded in _rounded(ours).items():
        if torch.equal(rounded.to(theirs.device, theirs.dtype), theirs.detach()):
            return name
    return None


def _rounded(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in the lower precisions that engines use."""
    weight = weight.detach()
    found = {name: weight.to(getattr(torch, name)).to(weight.dtype) for name in ("bfloat16", "float16")}
    for name, dims in (("fp8 by rows", (1,)), ("fp8", (0, 1))):
        size = weight.float().abs().amax(dims, keepdim=True).clamp(min=1e-12) / 448
        found[name] = ((weight.float() / size).to(torch.float8_e4m3fn).float() * size).to(weight.dtype)
    return {name: rounded for name, rounded in found.items() if not torch.equal(rounded, weight)}


# -- faults that are imitated ------------------------------------------------------------------------------------


def _imitated(case: Case, faults: Sequence[_Fault], before: float) -> Cause | None:
    """Return the fault that closes the gap best when the trainer has it too; None if none closes it."""
    if faults:
        case.progress("causes: known faults are tried on the trainer")
    found = [cause for try_fault in faults for cause in try_fault(case)]
    best = min(found, key=lambda cause: cause.stays or 0.0, default=None)
    if best is None or best.stays is None:
        return None
    enough = max(case.limits.gap * case.yardstick, 0.02 * before)
    return best if best.stays <= min(enough, _CLOSES * before) else None


def _temperature(case: Case) -> Iterator[Cause]:
    def gap(power: float) -> float:
        return case.gap(case.trainer.score(case.answers, temperature=case.temperature * math.exp(power)))

    power, stays = _least(gap, -0.7, 0.7)
    told = f"the engine's logits are divided by {case.temperature * math.exp(power):.3g}, the trainer's by "
    yield Cause("temperature", "sampling", f"{told}{case.temperature:.3g}", stays)


def _beginning(case: Case) -> Iterator[Cause]:
    without = [replace(each, ids=each.ids[1:], prompt=each.prompt - 1) for each in case.answers]
    if all(len(each.logprobs) < len(each.ids) for each in without):
        stays = case.gap(case.trainer.score(without, temperature=case.temperature))
        yield Cause("tokens", "first token", "the engine has not seen the first token of the prompt (BOS)", stays)
    if case.bos is not None:
        more = [replace(each, ids=[case.bos, *each.ids], prompt=each.prompt + 1) for each in case.answers]
        stays = case.gap(case.trainer.score(more, temperature=case.temperature))
        yield Cause("tokens", "first token", "the engine has put a BOS before the prompt", stays)


def _positions(case: Case) -> Iterator[Cause]:
    for shift in (1, -1):
        stays = case.gap(case.trainer.score(case.answers, temperature=case.temperature, shift=shift))
        yield Cause("positions", "decode", f"positions of decoded tokens are off by {shift:+d} in the engine", stays)


def _head(case: Case) -> Iterator[Cause]:
    head = case.trainer.inner.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        return
    kinds: dict[str, Tensor] = _rounded(weight)
    if weight.dtype.itemsize < 4:
        kinds["float32"] = weight.detach().float()
    for name, other in kinds.items():

        def hook(module: Any, args: Any, output: Tensor, other: Tensor = other) -> Tensor:
            bias = None if module.bias is None else module.bias.to(other.dtype)
            return linear(args[0].to(other.dtype), other, bias)

        with attach(case.trainer.model, case.trainer.head, hook, name="parity head"):
            stays = case.gap(case.trainer.score(case.answers, temperature=case.temperature))
        yield Cause("head", case.trainer.head, f"the engine's head is computed in {name}", stays)


def _rope(case: Case) -> Iterator[Cause]:
    tables = [
        (name, module.inv_freq)
        for name, module in case.trainer.inner.named_modules()
        if isinstance(getattr(module, "inv_freq", None), Tensor)
    ]
    config = case.trainer.inner.config
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", None)
    if not tables or not base:
        return

    def gap(power: float) -> float:
        with _other_base([table for _, table in tables], math.log(base), power):
            return case.gap(case.trainer.score(case.answers, temperature=case.temperature))

    powers = {math.log(other / base) for other in _BASES if other != base}
    start = min([*powers, 0.0], key=gap)
    power, stays = _least(gap, start - 0.5, start + 0.5)
    yield Cause("rope", "all layers", f"RoPE has base {base * math.exp(power):.4g} in the engine, not {base:g}", stays)


@contextmanager
def _other_base(tables: Sequence[Tensor], log_base: float, power: float) -> Iterator[None]:
    """Multiply the base of rotary embeddings by ``exp(power)`` while the block runs."""
    kept = [table.clone() for table in tables]
    try:
        for table in tables:
            table.copy_(table.double().pow(1 + power / log_base).to(table.dtype))
        yield
    finally:
        for table, old in zip(tables, kept, strict=True):
            table.copy_(old)


def _least(gap: Callable[[float], float], low: float, high: float, rounds: int = 12) -> tuple[float, float]:
    """Return where a function with one valley is least, and its value there, by golden section."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = gap(left), gap(right)
    for _ in range(rounds):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = gap(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = gap(right)
    return (left, at_left) if at_left < at_right else (right, at_right)


# -- layers ------------------------------------------------------------------------------------------------------


def _from_layers(case: Case, layers: LayerErrors, before: float) -> tuple[Cause, LayerErrors | None]:
    """Return the layer that stands out, confirmed by healing it, and the errors inside of it."""
    bad = [name for name in layers.bad if name in layers.found]
    blocks = [name for name in bad if name in case.trainer.blocks]
    if bad[:1] == [HEAD] and layers.scale[HEAD] >= 1.5 * max((layers.scale[name] for name in blocks), default=0.0):
        text = f"{layers.found[HEAD]:.3g} stays when all layers are healed"
        return Cause("head", case.trainer.head, text, layers.found[HEAD]), None
    if not blocks:
        outer = next((name for name in bad if name != HEAD), None)
        if outer is not None:
            return Cause(
                "weights", outer, f"its outputs are {layers.scale[outer]:.2g} times as far apart as usual"
            ), None
        return Cause("unsure", "unknown", "no layer stands out; save a healthy pair to compare with"), None
    if len(blocks) > len(case.trainer.blocks) / 2 and len(case.trainer.blocks) > 1:
        return _in_all(case, layers, blocks), None
    worst = blocks[0]
    sites = [name for name in case.trainer.sites if name in layers.found]
    previous = sites[sites.index(worst) - 1] if sites.index(worst) else None
    stays = healed_gap(case.trainer, case.answers, worst)
    earlier = before if previous is None else healed_gap(case.trainer, case.answers, previous)
    if stays > 0.95 * earlier:
        text = f"{worst} stands out ({layers.scale[worst]:.2g} times), but healing it does not close the gap"
        return Cause("unsure", "unknown", text, stays), None
    if len(blocks) > 1 and stays > case.limits.gap * case.yardstick:
        return Cause("unsure", "unknown", f"{listed(blocks)} stand out, and healing {worst} leaves {stays:.2g}"), None
    inside = _inside(case, worst)
    return _named_inside(case, layers, worst, inside, earlier, stays), inside


def _in_all(case: Case, layers: LayerErrors, blocks: Sequence[str]) -> Cause:
    decoded = [layers.decoded[name] for name in blocks if name in layers.decoded]
    text = f"{len(blocks)} of {len(case.trainer.blocks)} layers are off, each by itself"
    if decoded and min(decoded) > 3:
        return Cause("decode", "all layers", f"{text}, and decoded tokens alone: positions, or the key-value cache")
    return Cause("attention", "all layers", f"{text}: RoPE, its scaling, the mask, or other weights everywhere")


def _inside(case: Case, block: str) -> LayerErrors | None:
    """Return the errors of the modules inside of a block, given the engine's inputs of each."""
    roles = find_roles(case.trainer.model)
    parts = [name for role in ("attn", "mlp") for name in roles.get(role, []) if name.startswith(f"{block}.")]
    sites = case.trainer.sites
    names = [sites[sites.index(block) - 1], *case.trainer.inside(block), *parts]
    case.progress(f"inside of {block}")
    try:
        answers = case.engine.rescore(case.answers[:_LOOKED_INSIDE], names)
    except Exception:  # an engine without such modules
        return None
    if not answers or not all(answer.states for answer in answers):
        return None
    sides = case.trainer, case.twin, case.reference
    return measure_layers(*sides, answers, names, case.limits, with_head=False)


def _named_inside(
    case: Case, layers: LayerErrors, block: str, inside: LayerErrors | None, earlier: float, stays: float
) -> Cause:
    healed = f"healing it takes the gap from {earlier:.3g} to {stays:.3g}"
    is_mixture = any(name.startswith(f"{block}.") for name in find_roles(case.trainer.model).get("router", []))
    if is_mixture and 0 < layers.affected[block] < _TIES:
        share = f"{layers.affected[block]:.1%} of the tokens went to other experts"
        return Cause("router ties", block, f"{share}; {healed}", stays)
    bad = [name for name in (inside.bad if inside is not None else ()) if name.startswith(f"{block}.")]
    if not bad:
        return Cause("layer", block, healed, stays)
    linears = [name for name in bad if not name.endswith("o_proj") and name not in _containers(case)]
    if linears:
        shown = listed([name.removeprefix(f"{block}.") for name in linears])
        return Cause("weights", linears[0] if len(linears) == 1 else block, f"weights of {shown}; {healed}", stays)
    if is_mixture and not bad[0].endswith("o_proj"):
        return Cause("experts", block, f"experts or router of {bad[0]}; {healed}", stays)
    return Cause("attention", block, f"attention itself (RoPE, mask) or o_proj of {block}; {healed}", stays)


def _containers(case: Case) -> set[str]:
    roles = find_roles(case.trainer.model)
    return {name for role in ("attn", "mlp") for name in roles.get(role, [])}
