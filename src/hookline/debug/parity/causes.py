"""Give a gap between trainer and engine a name: compare parameters, try known faults on the trainer, read local errors.

`parity` makes a `Pair` and calls `find_cause`. A fault is named only if parameters differ, if the trainer with the same
fault closes the gap, or if one layer stands out and healing it closes the gap; all else is "unsure".

To find the layer in which the two part, the engine's hidden states are put into the trainer, module by module: each
gets what the engine's module got, and its output is compared before it is replaced too. So one forward of the trainer
tells the error of every layer by itself, and what stays between the log-probs when all layers are healed is the head's.
No engine is edited for that: states are all it has to give, over HTTP too. The same with the trainer's own states in
its copy of higher precision says how large an error of rounding is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.parity.sides import Answer, EngineSide, Scorer, apart, rms
from hookline.errors import HooklineError
from hookline.messages import listed
from hookline.sites.wrappers import unwrap

_HEAD: Final = "head"
_WIDE: Final = 2e-4
"""Trainers that compute in float32 are nearer to exact log-probs than this, in nats rms."""
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
    ``"attention"``, ``"router ties"``, ``"layer"`` or ``"unsure"``."""
    where: str
    """The module, or what else it is."""
    text: str
    """What was found, in a few words."""
    stays: float | None = None
    """The gap that stays when it is healed, or imitated in the trainer; nats rms."""


@dataclass(frozen=True)
class LayerError:
    """The local error of a module."""

    found: float
    """The norm of the difference of outputs against the norm of the output, rms over tokens; of the head, the
    difference of log-probs."""
    expected: float
    """What rounding alone, or a healthy pair, gives."""
    times: float
    """How many times that the error is."""
    limit: float
    """From so many times the expected error on, it is more than rounding."""
    affected: float
    """The share of tokens with more than four times the error of the median."""


Errors = Mapping[str, LayerError]


@dataclass(frozen=True)
class Pair:
    """The trainer, its weights in other precisions, and what an engine answered."""

    trainer: Scorer
    twin: Scorer
    """The trainer's weights in the engine's precision; the trainer itself if that is the same."""
    exact: Scorer
    """The trainer's weights in higher precision."""
    engine: EngineSide
    """It is asked for more states."""
    answers: Sequence[Answer]
    """The sequences that are looked at, with the engine's states if it gives any."""
    yardstick: float
    """The gap that rounding explains, in nats rms."""
    doubt: float
    """The standard error of the yardstick's square, against that: a few tokens have most of it."""
    healthy: Mapping[str, float]
    """The errors of layers in a healthy pair; empty if none is known."""
    tell: Callable[[str], None]
    """Is told what begins."""

    @property
    def is_wide(self) -> bool:
        """Return whether rounding is that of 16 bits; in float32 faults are a thousand times as large as rounding."""
        return self.yardstick >= _WIDE

    @property
    def most(self) -> float:
        """Return the largest gap that is explained.

        In 16 bits 1.5 times the yardstick if tokens are many. Of few, one or two decide on both sides, so that it has
        to be wider: 12 tokens of a trained model gave 1.4 times, 200 at most 0.9.
        """
        return (1.5 if self.is_wide else 5.0) * (1 + self.doubt / 2) * self.yardstick

    def gap(self, answers: Sequence[Answer] = (), *, healed: Sequence[str] = (), **other: Any) -> float:
        """Return how far the trainer is from the engine, in nats rms.

        Args:
            answers: Other sequences than those that are looked at.
            healed: Modules whose outputs are those of the engine.
            other: Fields of `Scorer` to change.
        """
        answers = answers or self.answers
        return rms(apart(answers, replace(self.trainer, **other).run(answers, healed, put=True)))

    def errors(self, answers: Sequence[Answer], names: Sequence[str]) -> dict[str, LayerError]:
        """Return the local errors of modules and of the head, in order.

        Args:
            answers: What the engine answered, with its states.
            names: The modules; those are left out of which an answer has no states.
        """
        rounded = self.twin.run(answers, names)
        names = [name for name in rounded[0].states if all(name in answer.states for answer in answers)]
        times, least = 2**0.5 if self.twin is self.trainer else 1.0, torch.finfo(self.twin.dtype).eps / 8
        expected = {name: times * rms(each) for name, each in _by_module(self.exact, names, rounded).items()}
        found = {}
        for name, each in _by_module(self.trainer, names, answers).items():
            limit = (1.5 if self.is_wide else 4.0) if name in self.healthy else (2.0 if self.is_wide else 8.0)
            affected = float((each.abs() > 4 * each.abs().median()).double().mean())
            usual = max(self.healthy.get(name, expected[name]), least)
            found[name] = LayerError(rms(each), usual, rms(each) / usual, limit, affected)
        return found


def _by_module(scorer: Scorer, names: Sequence[str], answers: Sequence[Answer]) -> dict[str, Tensor]:
    """Return the errors of tokens against the states of answers, by module, and the head's against their log-probs."""
    found = scorer.run(answers, names, put=True)
    errors = {name: torch.cat([answer.errors[name] for answer in found]) for name in names}
    return errors | {_HEAD: apart(answers, found)}


def find_cause(pair: Pair, layers: Errors) -> tuple[Cause | None, Errors]:
    """Return the cause, None where there is nothing to tell; and the errors inside of the worst layer, if it was asked.

    ``layers`` are the local errors; empty if the engine gives no states.
    """
    before = pair.gap()
    is_beyond = before > pair.most
    bad = _worst_first(layers)
    cause = None if pair.engine.model is None else _other_parameters(pair, pair.engine.model, layers)
    if cause is not None or not (is_beyond or bad):
        return cause, {}
    cause = _ties(pair, layers, bad)
    # those of the head, or of every layer
    if cause is None and (is_beyond or bad == [_HEAD] or set(pair.trainer.blocks) <= set(bad)):
        pair.tell("causes: known faults are tried on the trainer")
        cause = _imitated(pair, before, bad)
    if cause is not None or not layers:
        return cause or _unsure("no known fault closes it, and the engine gives no hidden states"), {}
    cause, inside = _from_layers(pair, layers, before)
    if not is_beyond and cause.name == "unsure":
        return None, inside
    if not is_beyond and pair.is_wide and not pair.healthy:
        # in 16 bits a small fault of all layers stands out in one alone
        cause = _unsure("errors of layers stand out; save a healthy pair to compare with")
    return cause, inside


def _worst_first(errors: Errors) -> list[str]:
    """Return the modules with more error than expected."""
    return sorted((n for n, each in errors.items() if each.times >= each.limit), key=lambda n: -errors[n].times)


def _unsure(text: str) -> Cause:
    return Cause("unsure", "unsure", text)


def _of_head(pair: Pair, layers: Errors) -> Cause:
    stays = f"; {layers[_HEAD].found:.2g} stays when all layers are healed" if layers else ""
    return Cause("head", pair.trainer.head, f"another dtype or other weights of the head{stays}")


# -- parameters --------------------------------------------------------------------------------------------------


def _other_parameters(pair: Pair, model: nn.Module, layers: Errors) -> Cause | None:
    """Return a cause if parameters of the engine's model differ from the trainer's."""
    ours, theirs = (dict(unwrap(each).named_parameters()) for each in (pair.trainer.inner, model))
    differ = [name for name in ours if name in theirs and not torch.equal(ours[name].to(theirs[name]), theirs[name])]
    if not differ:
        return None
    if {name.rpartition(".")[0] for name in differ} == {pair.trainer.head}:
        return _of_head(pair, layers)
    blocks = {next((block for block in pair.trainer.blocks if name.startswith(f"{block}.")), None) for name in differ}
    block = blocks.pop() if len(blocks) == 1 else None
    stays = pair.gap(healed=[block]) if block is not None and layers else None
    where = differ[0] if len(differ) == 1 else block or f"{len(differ)} of {len(ours)} parameters"
    if all(_is_permuted(ours[name], theirs[name]) for name in differ):
        return Cause("experts", where, "experts stand in each other's place", stays)
    shown = listed([name.removeprefix(f"{block}.") for name in differ])
    return Cause("weights", where, f"stale or other weights: {shown}", stays)


def _is_permuted(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether both hold the matrices of the same experts, in whatever order."""
    if ours.dim() != 3 or ours.shape != theirs.shape:
        return False
    one, other = (sorted(each.detach().double().flatten(1).sum(1).tolist()) for each in (ours, theirs))
    return one == other


# -- faults that are imitated ------------------------------------------------------------------------------------


def _imitated(pair: Pair, before: float, bad: Sequence[str]) -> Cause | None:
    """Return the fault that closes the gap best when the trainer has it too; None if none closes it."""
    of_layers = any(name in pair.trainer.blocks for name in bad)
    found = [*_tokens_and_positions(pair), *_rope(pair)] if of_layers or not bad else []
    if not of_layers:
        own = pair.trainer.temperature
        divisor, stays = _least(lambda each: pair.gap(temperature=each), own / 2, own * 2)
        text = f"the engine's logits are divided by {divisor:.3g}, the trainer's by {own:.3g}"
        found.append(Cause("temperature", "sampling", text, stays))
    best = min(found, key=lambda cause: cause.stays or 0.0)
    return best if (best.stays or 0.0) <= min(max(pair.most, 0.02 * before), _CLOSES * before) else None


def _tokens_and_positions(pair: Pair) -> Iterator[Cause]:
    bos = pair.trainer.inner.config.bos_token_id or 0
    longer = [replace(each, ids=[bos, *each.ids], prompt=each.prompt + 1) for each in pair.answers]
    yield Cause("tokens", "first token", "the engine has put a BOS before the prompt", pair.gap(longer))
    cut = [replace(each, ids=each.ids[1:], prompt=each.prompt - 1) for each in pair.answers]
    if all(len(each.logprobs) < len(each.ids) for each in cut):
        text = "the engine has not seen the first token of the prompt (BOS)"
        yield Cause("tokens", "first token", text, pair.gap(cut))
    for shift in (1, -1):
        yield Cause("positions", "decode", f"the engine's positions are off by {shift:+d} there", pair.gap(shift=shift))


def _rope(pair: Pair) -> Iterator[Cause]:
    inner = pair.trainer.inner
    tables = [each.inv_freq for each in inner.modules() if isinstance(getattr(each, "inv_freq", None), Tensor)]
    base = (getattr(inner.config, "rope_parameters", None) or {}).get("rope_theta")
    if not tables or not base:
        return
    kept = [table.clone() for table in tables]

    def gap(other: float) -> float:
        try:
            for table in tables:
                table.copy_(table.double().pow(math.log(other) / math.log(base)))
            return pair.gap()
        finally:
            for table, old in zip(tables, kept, strict=True):
                table.copy_(old)

    start = min([base, *_BASES], key=gap)
    found, stays = _least(gap, 0.6 * start, 1.65 * start)
    yield Cause("rope", "all layers", f"RoPE has base {found:.4g} in the engine, not {base:g}", stays)


def _least(gap: Callable[[float], float], low: float, high: float, rounds: int = 14) -> tuple[float, float]:
    """Return where a function with one valley is least, and its value there, by golden section of the logarithm."""
    gap = cache(gap)
    for _ in range(rounds):
        left, right = (float(f"{low**part * high ** (1 - part):.9g}") for part in (0.618034, 0.381966))
        low, high = (low, right) if gap(left) < gap(right) else (left, high)
    return min((left, right), key=gap), min(gap(left), gap(right))


# -- layers ------------------------------------------------------------------------------------------------------


def _ties(pair: Pair, layers: Errors, bad: Sequence[str]) -> Cause | None:
    """Return that routers chose other experts for a few tokens, if these have the gap and no layer is off by itself.

    Given the engine's inputs, a layer mostly chooses the engine's experts: then none stands out.
    """
    routers = pair.trainer.roles.get("router", [])
    routed = [name for name in layers if any(router.startswith(f"{name}.") for router in routers)]
    if not routers or any(name not in routed or not 0 < layers[name].affected < _TIES for name in bad):
        return None
    off = apart(pair.answers, pair.trainer.run(pair.answers)).abs().sort().values
    last = max(bad, key=list(layers).index, default=None)
    stays = rms(off[: math.ceil((1 - _TIES) * len(off))]) if last is None else pair.gap(healed=[last])
    share = layers[last].affected if last else float((off > 2 * pair.most).double().mean())
    text = f"{share:.1%} of the tokens are far off"
    cause = Cause("router ties", last or "routers", f"{text}: they went to other experts", stays)
    return None if stays > pair.most else cause if layers else _unsure(f"{text}: ties of the routers?")


def _from_layers(pair: Pair, layers: Errors, before: float) -> tuple[Cause, Errors]:
    """Return the layer that stands out, confirmed by healing it, and the errors inside of it."""
    bad, every = _worst_first(layers), len(pair.trainer.blocks)
    blocks = [name for name in bad if name in pair.trainer.blocks]
    if not bad:
        return _unsure("no layer stands out; save a healthy pair to compare with"), {}
    if bad[0] == _HEAD and all(layers[_HEAD].times >= 1.5 * layers[name].times for name in blocks):
        return replace(_of_head(pair, layers), stays=layers[_HEAD].found), {}
    if not blocks:
        return Cause("weights", bad[0], f"its outputs are {layers[bad[0]].times:.2g} x as far apart as usual"), {}
    if 1 < every < 2 * len(blocks):
        text = f"{len(blocks)} of {every} layers are off, each by itself: RoPE, mask, or a prefix cache"
        return Cause("attention", "all layers", text), {}
    worst = blocks[0]
    place = list(layers).index(worst)
    stays, earlier = pair.gap(healed=[worst]), pair.gap(healed=[list(layers)[place - 1]]) if place else before
    if stays > 0.95 * earlier or (len(blocks) > 1 and stays > pair.most):
        return _unsure(f"{listed(blocks)} stand out, but healing {worst} leaves {stays:.2g} of {earlier:.2g}"), {}
    pair.tell(f"inside of {worst}")
    healed = f"healing it takes the gap from {earlier:.2g} to {stays:.2g}"
    cause, inside = _look_inside(pair, worst, healed)
    return replace(cause, stays=stays), inside


def _look_inside(pair: Pair, block: str, healed: str) -> tuple[Cause, Errors]:
    """Return what inside of a layer is off, and the errors of its modules, given the engine's inputs of each."""
    roles, sites = pair.trainer.roles, pair.trainer.sites
    parts = [name for role in ("attn", "mlp") for name in roles.get(role, []) if name.startswith(f"{block}.")]
    own = [
        f"{block}.{name}"
        for name, module in pair.trainer.model.get_submodule(block).named_modules()
        if name and "experts" not in name and next(module.parameters(recurse=False), None) is not None
    ]
    names = [*sites[: sites.index(block)][-1:], *own, *parts]
    try:
        inside = pair.errors(pair.engine.rescore(pair.answers[:_LOOKED_INSIDE], names), names)
        inside.pop(_HEAD)
    except HooklineError as error:
        pair.engine.facts["inside"] = f"{block} was not looked into: {error}"
        inside = {}
    bad = [name for name in _worst_first(inside) if name.startswith(f"{block}.")]
    linears = [name for name in bad if not name.endswith("o_proj") and name not in parts]
    if not bad:
        return Cause("layer", block, healed), inside
    if linears:
        shown = listed([name.removeprefix(f"{block}.") for name in linears])
        return Cause("weights", linears[0] if len(linears) == 1 else block, f"weights of {shown}; {healed}"), inside
    if any(name.startswith(f"{block}.") for name in roles.get("router", [])) and not bad[0].endswith("o_proj"):
        return Cause("experts", block, f"experts or router of {bad[0]}; {healed}"), inside
    return Cause("attention", block, f"attention itself (RoPE, mask) or its o_proj; {healed}"), inside
