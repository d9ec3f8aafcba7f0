"""Run token sequences through a transformers model: log-probs, and what its modules return or are made to return.

`parity` and its parts call `Scorer`: for the trainer, for its copies in other precisions, and for an engine whose model
is in this process. It calls `attach`, `stream_of` and `with_stream`. `find_cause` calls `Pair`.

To find the layer in which the two part, the engine's hidden states are put into the trainer, module by module: each
gets what the engine's module got, and its output is compared before it is replaced too. So one forward of the trainer
tells the error of every layer by itself, and what stays between the log-probs when all layers are healed is the head's.
No engine is edited for that: states are all it has to give, over HTTP too. The same with the trainer's own states in
its copy of higher precision says how large an error of rounding is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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

__all__ = ["HEAD", "Answer", "LayerError", "Pair", "Scored", "Scorer", "States", "apart", "rms"]

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
    top: Tensor = field(default_factory=lambda: torch.empty(0))
    """The log-probs of the engine's likeliest tokens in their places; empty if it does not give these."""
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


class Scored:
    """What a model gave for sequences, each by its number.

    Args:
        count: How many sequences.
        kept: Of so many the outputs of modules are kept.
        put: For each sequence, what was put in place of the outputs of modules.
    """

    def __init__(self, count: int, kept: int, put: Sequence[States] | None) -> None:
        self.logprobs = [torch.empty(0)] * count
        """Of the last tokens, as many as the engine gave: float64, on the host."""
        self.is_likeliest = [torch.empty(0)] * count
        """Whether each of these is the model's likeliest token."""
        self.states: list[dict[str, Tensor]] = [{} for _ in range(kept)]
        """What the modules returned, if nothing was put; of the first sequences."""
        self.errors: list[dict[str, Tensor]] = [{} for _ in range(count)]
        """For each token, how far the output of a module was from what was put there, against the norm of that."""
        self.rows: list[tuple[int, int, slice]] = []
        """Which sequence stands in which row and columns of the next forward."""
        self._put = put

    def hook(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
        """Read the output of one module, or measure and replace it."""
        stream = stream_of(module, output)
        if stream is None or stream.dim() != 3:
            return None
        if self._put is None:
            for number, row, columns in self.rows:
                if number < len(self.states):
                    self.states[number][site.name] = stream[row, columns][:-1].detach().clone()
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
            self.errors[number][site.name] = (off / rows.double().norm(dim=-1).clamp(min=1e-300)).cpu()
            place.copy_(rows)
        return with_stream(module, output, new)


class Scorer:
    """Run token sequences through a causal language model of transformers.

    Args:
        model: The model; it is run in eval mode, and put back into the mode it was in.
        batch: So many sequences are run together.
        temperature: What logits are divided by.
    """

    def __init__(self, model: nn.Module, batch: int = 8, temperature: float = 1.0) -> None:
        inner: Any = unwrap(model)
        self.model, self.inner, self.batch, self.temperature = model, inner, batch, temperature
        if not hasattr(inner, "get_input_embeddings"):
            raise OptionError(f"parity takes a causal language model of transformers, got {type(inner).__name__}.")
        embedding: Tensor = inner.get_input_embeddings().weight
        self.device, self.dtype, self.vocabulary = embedding.device, embedding.dtype, len(embedding)
        self.roles = find_roles(model)
        self.blocks = self.roles.get("resid", [])
        self.head = self.roles.get("unembed", ["lm_head"])[0]
        self.sites = [*self.roles.get("embed", [])[:1], *self.blocks, *self.roles.get("final_norm", [])[:1]]
        """The modules whose outputs are compared: the embedding, the blocks and the last norm."""

    def of(self, model: nn.Module | None = None, *, batch: int = 0, temperature: float = 0.0) -> Scorer:
        """Return a scorer that has something other than this one; 0 is as here."""
        return Scorer(model or self.model, batch or self.batch, temperature or self.temperature)

    @torch.no_grad()
    def run(
        self,
        answers: Sequence[Answer],
        *,
        names: Sequence[str] = (),
        kept: int | None = None,
        put: Sequence[States] | None = None,
        left: bool = False,
        shift: int = 0,
    ) -> Scored:
        """Run sequences, and return what the model gave for each.

        Args:
            answers: The sequences.
            names: The modules whose outputs are kept.
            kept: Of so many sequences; of all if None.
            put: For each sequence, what to put in place of the outputs of modules.
            left: Pad on the left.
            shift: Move the positions of the answers by so many.
        """
        scored = Scored(len(answers), len(answers) if kept is None else kept, put)
        sites = [*(put[0] if put else names)]
        order = sorted(range(len(answers)), key=lambda number: -len(answers[number].ids))
        tapped = attach(self.model, sites, scored.hook, name="parity") if sites else nullcontext()
        with in_eval_mode(self.model), tapped:
            for begin in range(0, len(order), self.batch):
                self._run_batch(answers, order[begin : begin + self.batch], scored, left, shift)
        return scored

    def _run_batch(
        self, answers: Sequence[Answer], numbers: Sequence[int], scored: Scored, left: bool, shift: int
    ) -> None:
        width = len(answers[numbers[0]].ids)
        ids, mask, positions = torch.zeros(3, len(numbers), width, dtype=torch.long)
        scored.rows = []
        for row, number in enumerate(numbers):
            length = len(answers[number].ids)
            columns = slice(width - length, width) if left else slice(0, length)
            ids[row, columns] = torch.tensor(answers[number].ids)
            mask[row, columns] = 1
            positions[row, columns] = torch.arange(length) + shift * (torch.arange(length) >= answers[number].prompt)
            scored.rows.append((number, row, columns))
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions.clamp(min=0)}
        every = self.model(**{name: each.to(self.device) for name, each in inputs.items()}, use_cache=False).logits
        for number, row, columns in scored.rows:
            wanted = answers[number].scored.to(self.device)
            logits = every[row, columns.stop - len(wanted) - 1 : columns.stop - 1]
            logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
            chosen = logits.gather(-1, wanted[:, None])[:, 0]
            scored.logprobs[number] = (chosen - logits.logsumexp(-1)).double().cpu()
            scored.is_likeliest[number] = (logits.argmax(-1) == wanted).cpu()


# -- local errors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerError:
    """The local error of a module."""

    found: float
    """The norm of the difference of outputs against the norm of the output, rms over tokens; of the head, the
    difference of log-probs."""
    expected: float
    """What rounding alone, or a healthy pair, gives."""
    limit: float
    """From so many times the expected error on, it is more than rounding."""
    affected: float
    """The share of tokens with more than four times the error of the median."""

    @property
    def times(self) -> float:
        """Return how many times the expected error it is."""
        return self.found / self.expected

    @property
    def is_beyond(self) -> bool:
        """Return whether it is more than rounding."""
        return self.times >= self.limit


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
    doubt: float
    """The standard error of the yardstick's square, against that: a few tokens have most of it."""
    healthy: Mapping[str, float] | None = None
    """The errors of layers in a healthy pair, if one is known."""

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
        """Return the largest gap that is explained.

        In 16 bits 1.5 times the yardstick if tokens are many. Of few, one or two decide on both sides, so that it has
        to be wider: 12 tokens of a trained model gave 1.4 times, 200 at most 0.9.
        """
        return (1.5 if self.is_wide else 5.0) * (1 + self.doubt / 2) * self.yardstick

    def gap(self, scorer: Scorer, answers: Sequence[Answer] | None = None, **options: Any) -> float:
        """Return how far a scorer is from the engine's log-probs, in nats rms; options are those of `Scorer.run`."""
        answers = answers or self.answers
        return rms(apart(_logprobs(answers), scorer.run(answers, **options).logprobs))

    def healed_gap(self, name: str) -> float:
        """Return the gap that stays when the engine's output of one module is put into the trainer."""
        return self.gap(self.trainer, put=[{name: answer.states[name]} for answer in self.answers])

    def errors(
        self, answers: Sequence[Answer], twin: Scored, healthy: Mapping[str, float] | None = None
    ) -> dict[str, LayerError]:
        """Return the local errors of modules and of the head, in order.

        Args:
            answers: What the engine answered, with its states.
            twin: What the twin gave for the same sequences.
            healthy: What is expected; what rounding gives by itself if None.
        """
        names = [name for name in twin.states[0] if all(name in answer.states for answer in answers)]
        found = _by_module(self.trainer, names, answers, [each.states for each in answers], _logprobs(answers))
        if healthy is None:
            times = 2**0.5 if self.twin is self.trainer else 1.0
            rounding = _by_module(self.exact, names, answers, twin.states, twin.logprobs[: len(answers)])
            healthy = {name: times * rms(parts) for name, parts in rounding.items()}
            limit = 2.0 if self.is_wide else 8.0
        else:
            limit = 1.5 if self.is_wide else 4.0
        least = torch.finfo(self.twin.dtype).eps / 8
        return {
            name: LayerError(rms(parts), max(healthy.get(name, 0.0), least), limit, _share_of_large(torch.cat(parts)))
            for name, parts in found.items()
        }


def _logprobs(answers: Sequence[Answer]) -> list[Tensor]:
    return [answer.logprobs for answer in answers]


def _by_module(
    scorer: Scorer, names: Sequence[str], answers: Sequence[Answer], states: Sequence[States], logprobs: list[Tensor]
) -> dict[str, list[Tensor]]:
    """Return the errors of tokens against given states, by module, and the head's against given log-probs."""
    scored = scorer.run(answers, put=[{name: each[name] for name in names} for each in states])
    return {name: [each[name] for each in scored.errors] for name in names} | {HEAD: apart(logprobs, scored.logprobs)}


def _share_of_large(errors: Tensor) -> float:
    """Return the share of tokens with more than four times the error of the median."""
    return float((errors.abs() > 4 * errors.abs().median()).double().mean())
