"""Score token sequences with a transformers model, and read or replace what its modules return meanwhile.

`parity` and its parts call `Scorer`: for the trainer, for its copies in other precisions, and for an engine whose model
is in this process. It calls `attach`, `stream_of` and `with_stream`. `find_cause` calls `Pair`.

To find the layer in which the two part, the engine's hidden states are put into the trainer, module by module: each
gets what the engine's module got, and its output is compared before it is replaced too. So one forward of the trainer
tells the error of every layer by itself, and what stays between the log-probs when all layers are healed is the head's.
No engine is edited for that: states are all it has to give, over HTTP too. The same with the trainer's own states in
its copy of higher precision says how large an error of rounding is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.factories.replacing import stream_of, with_stream
from hookline.phases import in_eval_mode
from hookline.sites.attach import attach
from hookline.sites.roles import find_roles
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["HEAD", "Answer", "LayerError", "LayerErrors", "Pair", "Scorer", "States", "apart", "rms"]

HEAD: Final = "head"
_WIDE: Final = 2e-4
"""Trainers that compute in float32 are nearer to exact log-probs than this, in nats rms."""
States = Mapping[str, Tensor]
"""The outputs of modules for one sequence, by the module's name: (tokens, features), from position 0 on."""


@dataclass
class Answer:
    """One sequence of prompt and answer, as an engine gave it."""

    ids: list[int]
    """Prompt and answer."""
    prompt: int
    """How many of them are the prompt."""
    logprobs: Tensor
    """Of the last tokens, as many as it has: float64, on the host."""
    is_likeliest: list[bool] | None = None
    """Whether each of these is the engine's likeliest token."""
    states: States = field(default_factory=dict)
    """Outputs of modules at all tokens but the last."""

    @property
    def scored(self) -> Tensor:
        """Return the tokens that have a log-prob."""
        return torch.tensor(self.ids[len(self.ids) - len(self.logprobs) :], dtype=torch.long)


def rms(values: Sequence[Tensor]) -> float:
    """Return the root of the mean square of all numbers."""
    return float(torch.cat([each.double().flatten() for each in values]).square().mean().sqrt())


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Return the difference of each pair."""
    return [first - second for first, second in zip(one, other, strict=True)]


class Tap:
    """Keep what modules return for each sequence; with ``put``, measure how far it is from that, and replace it.

    Args:
        names: The modules.
        put: For each sequence, what to put in place of their outputs.
    """

    def __init__(self, names: Sequence[str], put: Sequence[States] | None = None) -> None:
        self.names = list(names)
        self.states: dict[int, dict[str, Tensor]] = {}
        """By sequence, then module: what was returned, if nothing was put."""
        self.errors: dict[str, dict[int, Tensor]] = {}
        """By module, then sequence: for each token, the norm of the difference against the norm of what was put."""
        self.rows: list[tuple[int, int, slice]] = []
        """Which sequence stands in which row and columns of the next forward."""
        self._put = put

    def hook(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
        """Read the output of one module, or replace it."""
        stream = stream_of(module, output)
        if stream is None or stream.dim() != 3:
            return None
        if self._put is None:
            for number, row, columns in self.rows:
                self.states.setdefault(number, {})[site.name] = stream[row, columns][:-1].detach().clone()
            return None
        new = stream.clone()
        for number, row, columns in self.rows:
            rows = self._put[number][site.name].to(new.device)
            place = new[row, columns][:-1]
            if place.shape != rows.shape:
                raise OptionError(
                    f"{site.name} gives {[*place.shape]} numbers in the trainer and {[*rows.shape]} in the engine: "
                    "it is another model, or left out tokens that it had cached."
                )
            off = (place.double() - rows.double()).norm(dim=-1)
            errors = off / rows.double().norm(dim=-1).clamp(min=1e-300)
            self.errors.setdefault(site.name, {})[number] = errors.cpu()
            place.copy_(rows)
        return with_stream(module, output, new)


class Scorer:
    """Compute log-probs of given tokens with a causal language model of transformers.

    Args:
        model: The model; it is run in eval mode, and put back into the mode it was in.
        batch: So many sequences are run together.
        temperature: What logits are divided by.
    """

    def __init__(self, model: nn.Module, batch: int = 8, temperature: float = 1.0) -> None:
        inner: Any = unwrap(model)
        self.model, self.inner, self.batch, self.temperature = model, inner, batch, temperature
        if not hasattr(inner, "get_input_embeddings"):
            raise OptionError(
                f"A trainer's model is a causal language model of transformers, got {type(inner).__name__}."
            )
        embedding: Tensor = inner.get_input_embeddings().weight
        self.device, self.dtype, self.vocabulary = embedding.device, embedding.dtype, int(embedding.shape[0])
        self.roles = find_roles(model)
        self.blocks = self.roles.get("resid", [])
        self.head = self.roles.get("unembed", ["lm_head"])[0]
        self.sites = [*self.roles.get("embed", [])[:1], *self.blocks, *self.roles.get("final_norm", [])[:1]]
        """The modules whose outputs are compared: the embedding, the blocks and the last norm."""

    def of(
        self, model: nn.Module | None = None, *, batch: int | None = None, temperature: float | None = None
    ) -> Scorer:
        """Return a scorer that has something other than this one."""
        return Scorer(model or self.model, batch or self.batch, temperature or self.temperature)

    def score(
        self, answers: Sequence[Answer], *, left: bool = False, shift: int = 0, tap: Tap | None = None
    ) -> list[Tensor]:
        """Return the log-probs of the last tokens of each sequence, as many as its engine gave; float64, on the host.

        Args:
            answers: The sequences.
            left: Pad on the left.
            shift: Move the positions of the answers by so many.
            tap: What to read or replace meanwhile.
        """
        found: dict[int, Tensor] = {}
        for number, logits in self._logits(answers, left, shift, tap):
            chosen = logits.gather(-1, answers[number].scored.to(logits.device)[:, None])[:, 0]
            found[number] = (chosen - logits.logsumexp(-1)).double().cpu()
        return [found[number] for number in range(len(answers))]

    def is_likeliest(self, answers: Sequence[Answer]) -> list[list[bool]]:
        """Return for each token that has a log-prob whether it is the likeliest."""
        every = {number: logits.argmax(-1).cpu() for number, logits in self._logits(answers)}
        return [(every[number] == answer.scored).tolist() for number, answer in enumerate(answers)]

    def captured(self, answers: Sequence[Answer], names: Sequence[str]) -> tuple[list[Tensor], list[States]]:
        """Return the log-probs, and what the modules ``names`` returned for each sequence."""
        tap = Tap(names)
        scores = self.score(answers, tap=tap)
        return scores, [tap.states.get(number, {}) for number in range(len(answers))]

    @torch.no_grad()
    def _logits(
        self, answers: Sequence[Answer], left: bool = False, shift: int = 0, tap: Tap | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each sequence and the logits that its scored tokens are drawn from."""
        order = sorted(range(len(answers)), key=lambda number: -len(answers[number].ids))
        with in_eval_mode(self.model), self._tapped(tap):
            for begin in range(0, len(order), self.batch):
                yield from self._run(answers, order[begin : begin + self.batch], left, shift, tap)

    def _tapped(self, tap: Tap | None) -> AbstractContextManager[object]:
        return nullcontext() if tap is None else attach(self.model, tap.names, tap.hook, name="parity")

    def _run(
        self, answers: Sequence[Answer], numbers: Sequence[int], left: bool, shift: int, tap: Tap | None
    ) -> Iterator[tuple[int, Tensor]]:
        width = len(answers[numbers[0]].ids)
        ids = torch.zeros(len(numbers), width, dtype=torch.long)
        mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
        rows = []
        for row, number in enumerate(numbers):
            length = len(answers[number].ids)
            columns = slice(width - length, width) if left else slice(0, length)
            ids[row, columns] = torch.tensor(answers[number].ids)
            mask[row, columns] = 1
            positions[row, columns] = torch.arange(length) + shift * (torch.arange(length) >= answers[number].prompt)
            rows.append((number, row, columns))
        if tap is not None:
            tap.rows = rows
        options = {"attention_mask": mask.to(self.device), "position_ids": positions.clamp(min=0).to(self.device)}
        every = self.model(input_ids=ids.to(self.device), use_cache=False, **options).logits
        for number, row, columns in rows:
            logits = every[row, columns.stop - len(answers[number].logprobs) - 1 : columns.stop - 1]
            yield number, (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature


# -- local errors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerError:
    """The local error of a module."""

    found: float
    """The norm of the difference of outputs against the norm of the output, rms over tokens; of the head, the
    difference of log-probs."""
    expected: float
    """What rounding alone, or a healthy pair, gives."""

    @property
    def times(self) -> float:
        """Return how many times the expected error it is."""
        return self.found / self.expected


@dataclass(frozen=True)
class LayerErrors:
    """The local errors of modules, in order; the head comes last."""

    each: dict[str, LayerError]
    tokens: dict[str, list[Tensor]]
    """The error of each token, by module, then sequence."""
    limit: float
    """From so many times the expected error on, it is more than rounding."""

    @property
    def bad(self) -> list[str]:
        """Return the modules with more error than expected, the worst first."""
        found = [name for name, error in self.each.items() if error.times >= self.limit]
        return sorted(found, key=lambda name: -self.each[name].times)


@dataclass(frozen=True)
class Pair:
    """The trainer, its weights in other precisions, and what an engine answered."""

    trainer: Scorer
    twin: Scorer
    """The trainer's weights in the engine's precision; the trainer itself if that is the same."""
    exact: Scorer
    """The trainer's weights in higher precision."""
    answers: Sequence[Answer]
    """The sequences that are looked at, with the engine's states if it gives any."""
    yardstick: float
    """The gap that rounding explains, in nats rms."""
    healthy: Mapping[str, float] | None = None
    """The errors of layers in a healthy pair."""

    @property
    def is_wide(self) -> bool:
        """Return whether rounding is that of 16 bits; in float32 faults are a thousand times as large as rounding."""
        return self.yardstick >= _WIDE

    @property
    def precision(self) -> str:
        """Return whose rounding it is; models of float32 may compute in less, as under autocast."""
        lower = str(min(self.trainer.dtype, self.twin.dtype, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
        return {"bfloat16": "bf16", "float16": "fp16"}.get(lower, "16-bit rounding" if self.is_wide else lower)

    @property
    def most(self) -> float:
        """Return the largest gap that is explained; the limits were measured on random and trained models."""
        return (1.5 if self.is_wide else 5.0) * self.yardstick

    def gap(self, scores: Sequence[Tensor], answers: Sequence[Answer] | None = None) -> float:
        """Return how far scores of the trainer are from the engine's log-probs, in nats rms."""
        return rms(apart([answer.logprobs for answer in answers or self.answers], scores))

    def healed_gap(self, name: str) -> float:
        """Return the gap that stays when the engine's output of one module is put into the trainer."""
        put = [{name: answer.states[name]} for answer in self.answers]
        return self.gap(self.trainer.score(self.answers, tap=Tap([name], put)))

    def errors(self, answers: Sequence[Answer], names: Sequence[str], *, inside: bool = False) -> LayerErrors:
        """Return the local errors of modules and the head, or of modules inside of a layer alone."""
        known = [name for name in names if all(name in answer.states for answer in answers)]
        tokens, healed = _local(self.trainer, answers, known, [answer.states for answer in answers])
        found = {name: rms(parts) for name, parts in tokens.items()}
        if not inside:
            found[HEAD] = self.gap(healed, answers)
        healthy = None if inside else self.healthy
        if healthy is None:
            scores, states = self.twin.captured(answers, known)
            rounding, exact = _local(self.exact, answers, known, states)
            times = 2**0.5 if self.twin is self.trainer else 1.0
            healthy = {name: times * rms(parts) for name, parts in rounding.items()}
            healthy[HEAD] = times * rms(apart(scores, exact))
            limit = 2.0 if self.is_wide else 8.0
        else:
            limit = 1.5 if self.is_wide else 4.0
        least = torch.finfo(self.twin.dtype).eps / 8
        each = {name: LayerError(error, max(healthy.get(name, 0.0), least)) for name, error in found.items()}
        return LayerErrors(each, tokens, limit)


def _local(
    scorer: Scorer, answers: Sequence[Answer], names: Sequence[str], states: Sequence[States]
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the errors of each token by module, and the log-probs that come of the states."""
    tap = Tap(names, states)
    scores = scorer.score(answers, tap=tap)
    return {name: [parts[number] for number in sorted(parts)] for name, parts in tap.errors.items()}, scores
