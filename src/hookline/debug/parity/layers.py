"""Find the layer in which trainer and engine part: local errors, what is inside of the worst, healing.

The engine's hidden states are put into the trainer, module by module: each gets what the engine's module got, and its
output is compared before it is replaced too. So one forward of the trainer tells the error of every layer by itself,
and what stays between the log-probs when all layers are healed is the head's. No engine is edited for that: states are
all it has to give, over HTTP too.

The same with the trainer's own states in its copy of higher precision says how large an error of rounding is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.parity.scoring import Answer, Scorer, States, Tap, rms

__all__ = ["HEAD", "WIDE", "LayerErrors", "Precision", "healed_gap", "measure_layers"]

HEAD: Final = "head"
WIDE: Final = 2e-4
"""Trainers that compute in float32 are nearer to exact log-probs than this, in nats rms."""


@dataclass(frozen=True)
class Precision:
    """From where on a number is more than rounding explains; measured on random and trained models."""

    gap: float
    """Of the gap, against its yardstick."""
    layer: float
    """Of a local error, against what rounding predicts for this layer."""
    healthy: float
    """Of a local error, against that of a healthy pair."""

    @classmethod
    def of(cls, distance: float) -> Precision:
        """Return the limits for a trainer so far from exact log-probs; in float32 faults are a thousand times that."""
        return cls(5.0, 8.0, 4.0) if distance < WIDE else cls(1.5, 2.0, 1.5)


@dataclass
class LayerErrors:
    """The local error of each module: of the embedding, the blocks, the last norm and the head."""

    found: dict[str, float]
    """The norm of the difference of outputs against the norm of the output, as the root of the mean over tokens; of
    the head, the difference of log-probs."""
    expected: dict[str, float]
    """What rounding alone, or a healthy pair, gives."""
    decoded: dict[str, float] = field(default_factory=dict)
    """The error of decoded tokens against that of the prompt's, where there are both."""
    affected: dict[str, float] = field(default_factory=dict)
    """The share of tokens whose error is more than four times the median: a few are routed to other experts."""
    limit: float = 2.0

    @property
    def scale(self) -> dict[str, float]:
        """Return how many times the expected error each module has."""
        return {name: error / self.expected[name] for name, error in self.found.items()}

    @property
    def bad(self) -> list[str]:
        """Return the modules with more error than expected, the worst first."""
        scale = self.scale
        return sorted((name for name in scale if scale[name] >= self.limit), key=lambda name: -scale[name])

    def to_json(self) -> list[dict[str, Any]]:
        """Return a row for each module."""
        return [
            {"module": name, "error": error, "expected": self.expected[name], "times": self.scale[name]}
            for name, error in self.found.items()
        ]


def measure_layers(
    trainer: Scorer,
    twin: Scorer,
    reference: Scorer,
    answers: Sequence[Answer],
    names: Sequence[str],
    limits: Precision,
    healthy: Mapping[str, float] | None = None,
    *,
    with_head: bool = True,
) -> LayerErrors:
    """Return the local error of the modules ``names``, and of the head.

    Args:
        trainer: The trainer.
        twin: The trainer's weights in the engine's precision; the trainer itself if that is the same.
        reference: The trainer's weights in higher precision.
        answers: Sequences with the engine's states.
        names: The modules.
        limits: From where on an error is more than rounding.
        healthy: Their errors in a healthy pair.
        with_head: False if the states end inside of a layer.
    """
    known = [name for name in names if all(name in answer.states for answer in answers)]
    found, healed = _local(trainer, answers, known, [answer.states for answer in answers])
    errors = {name: _summed(parts) for name, parts in found.items()}
    smallest = torch.finfo(twin.dtype).eps / 8
    if healthy is None:
        own_scores, own = twin.captured(answers, known)
        rounding, own_healed = _local(reference, answers, known, own)
        times = 2**0.5 if twin.dtype == trainer.dtype else 1.0
        expected = {name: max(times * _summed(parts), smallest) for name, parts in rounding.items()}
        head = max(times * rms(_apart(own_scores, own_healed)), smallest)
    else:
        expected = {name: max(healthy.get(name, 0.0), smallest) for name in errors}
        head = max(healthy.get(HEAD, 0.0), smallest)
    if with_head:
        errors[HEAD] = rms(_apart([answer.logprobs for answer in answers], healed))
        expected[HEAD] = head
    return LayerErrors(
        errors,
        {name: expected[name] for name in errors},
        _decoded(found, answers),
        {name: _share(parts) for name, parts in found.items()},
        limits.layer if healthy is None else limits.healthy,
    )


def healed_gap(trainer: Scorer, answers: Sequence[Answer], name: str) -> float:
    """Return the gap that stays when the engine's output of one module is put into the trainer."""
    put = [{name: answer.states[name]} for answer in answers]
    _, healed = _local(trainer, answers, [name], put)
    return rms(_apart([answer.logprobs for answer in answers], healed))


def _local(
    scorer: Scorer, answers: Sequence[Answer], names: Sequence[str], states: Sequence[States]
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the errors of each token by module, and the log-probs that come of the states."""
    tap = Tap(names, states)
    scores = scorer.score(answers, tap=tap)
    return {name: [tap.errors[name][number] for number in sorted(tap.errors[name])] for name in tap.errors}, scores


def _summed(parts: Sequence[Tensor]) -> float:
    return rms([part for part in parts if len(part)])


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [first - second for first, second in zip(one, other, strict=True)]


def _share(parts: Sequence[Tensor]) -> float:
    every = torch.cat(list(parts))
    return float((every > 4 * every.median()).double().mean())


def _decoded(found: Mapping[str, Sequence[Tensor]], answers: Sequence[Answer]) -> dict[str, float]:
    """Return the error of tokens of answers over that of tokens of prompts, for each module that has both."""
    ratios = {}
    for name, parts in found.items():
        prompts = [part[: answer.prompt] for part, answer in zip(parts, answers, strict=True)]
        answered = [part[answer.prompt :] for part, answer in zip(parts, answers, strict=True)]
        if any(map(len, answered)) and any(map(len, prompts)) and _summed(prompts):
            ratios[name] = _summed(answered) / _summed(prompts)
    return ratios
