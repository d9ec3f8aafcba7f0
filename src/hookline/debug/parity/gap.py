"""Measure how far two sets of log-probs of the same tokens are apart: overall, by position, by class, by sequence.

`parity` makes a `Gap` of trainer and engine, and others of each side against itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.parity.scoring import Answer

__all__ = ["Gap", "Group", "measure_gap", "outside", "worst_tokens"]

_RATIO: Final = (0.9, 1.1)
"""The ratios of probabilities, trainer over engine, that people count the others of."""
_RARE: Final = math.log(0.01)
_DECODED: Final = (16, 128)
"""Where the groups of decoded tokens end."""


@dataclass(frozen=True)
class Group:
    """Some tokens: how many, how far apart, and the share whose ratio is outside [0.9, 1.1]."""

    tokens: int
    rms: float
    outside: float


@dataclass(frozen=True)
class Gap:
    """The difference of two log-probs of each token, engine minus trainer, in nats."""

    tokens: int
    rms: float
    mean: float
    """With its sign: the engine's log-probs are higher by this."""
    mean_abs: float
    p50: float
    p99: float
    max: float
    outside: float
    """The share of tokens whose ratio of probabilities, trainer over engine, is outside [0.9, 1.1]."""
    other_likeliest: float | None = None
    """The share of tokens in whose place the sides find another one likeliest; None if the engine does not say."""
    by_position: dict[str, Group] = field(default_factory=dict)
    by_class: dict[str, Group] = field(default_factory=dict)
    by_sequence: list[Group] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return asdict(self)


def outside(difference: Tensor) -> float:
    """Return the share of ratios outside [0.9, 1.1]."""
    ratio = (-difference).exp()
    return float(((ratio < _RATIO[0]) | (ratio > _RATIO[1])).double().mean()) if len(ratio) else 0.0


def measure_gap(
    answers: Sequence[Answer],
    engine: Sequence[Tensor],
    trainer: Sequence[Tensor],
    likeliest: Sequence[Sequence[int]] = (),
    special: Collection[int] = (),
) -> Gap:
    """Return how far the log-probs of two sides are apart.

    Args:
        answers: The sequences.
        engine: Log-probs of the last tokens of each, by one side.
        trainer: The same tokens, by the other.
        likeliest: The trainer's likeliest token in place of each.
        special: The tokens that the tokenizer calls special.
    """
    parts = [one - other for one, other in zip(engine, trainer, strict=True)]
    every = torch.cat(parts)
    size = every.abs()
    known = [
        (ours, answer.likeliest)
        for ours, answer in zip(likeliest, answers, strict=False)
        if answer.likeliest is not None
    ]
    differ = [one != other for ours, theirs in known for one, other in zip(ours, theirs, strict=True)]
    ids = torch.tensor([id for answer, part in zip(answers, parts, strict=True) for id in answer.ids[-len(part) :]])
    is_special = torch.isin(ids, torch.tensor(sorted(special), dtype=torch.long))
    is_rare = (torch.cat(list(trainer)) < _RARE) & ~is_special
    classes = {"special": is_special, "rare (p < 1 %)": is_rare, "other": ~is_special & ~is_rare}
    return Gap(
        tokens=len(every),
        rms=float(every.square().mean().sqrt()),
        mean=float(every.mean()),
        mean_abs=float(size.mean()),
        p50=float(size.quantile(0.5)),
        p99=float(size.quantile(0.99)),
        max=float(size.max()),
        outside=outside(every),
        other_likeliest=sum(differ) / len(differ) if differ else None,
        by_position=_groups(every, _positions(answers, parts)),
        by_class=_groups(every, classes),
        by_sequence=[_group(part) for part in parts],
    )


def _positions(answers: Sequence[Answer], parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return which tokens stand where: in the prompt, or in pieces of the answer."""
    place = torch.cat(
        [
            torch.arange(len(answer.ids) - len(part), len(answer.ids)) - answer.prompt
            for answer, part in zip(answers, parts, strict=True)
        ]
    )
    first, second = _DECODED
    return {
        "prompt": place < 0,
        f"answer 1-{first}": (place >= 0) & (place < first),
        f"answer {first + 1}-{second}": (place >= first) & (place < second),
        f"answer {second + 1}-": place >= second,
    }


def _groups(every: Tensor, masks: dict[str, Tensor]) -> dict[str, Group]:
    return {name: _group(every[mask]) for name, mask in masks.items() if bool(mask.any())}


def _group(part: Tensor) -> Group:
    return Group(len(part), float(part.square().mean().sqrt()) if len(part) else 0.0, outside(part))


def worst_tokens(
    answers: Sequence[Answer], trainer: Sequence[Tensor], text: Callable[[Sequence[int]], str], most: int = 12
) -> list[dict[str, Any]]:
    """Return the tokens with the largest gaps: their text with what stands before it, and both log-probs."""
    found = []
    for number, (answer, ours) in enumerate(zip(answers, trainer, strict=True)):
        off = answer.logprobs - ours
        for index in off.abs().topk(min(most, len(off))).indices.tolist():
            place = len(answer.ids) - len(off) + index
            found.append((abs(float(off[index])), number, place, float(ours[index]), float(answer.logprobs[index])))
    found.sort(reverse=True)
    return [
        {
            "sequence": number,
            "position": place,
            "before": text(answers[number].ids[max(0, place - 6) : place]),
            "token": text(answers[number].ids[place : place + 1]),
            "trainer": ours,
            "engine": theirs,
        }
        for _, number, place, ours, theirs in found[:most]
    ]
