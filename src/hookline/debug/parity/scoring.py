"""Score token sequences with a transformers model, and read or replace what its modules return meanwhile.

`parity` and its parts call `Scorer`: for the trainer, for its copy of higher precision, and for engines whose model is
in this process. It calls `attach`, `stream_of` and `with_stream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.factories.replacing import stream_of, with_stream
from hookline.sites.attach import attach
from hookline.sites.roles import find_roles
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["Answer", "Scorer", "States", "Tap", "rms"]

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
    likeliest: list[int] | None = None
    """The engine's likeliest token in place of each of these."""
    states: States = field(default_factory=dict)
    """Outputs of modules at all tokens but the last."""


def rms(values: Sequence[Tensor]) -> float:
    """Return the root of the mean square of all numbers."""
    return float(torch.cat([each.double().flatten() for each in values]).square().mean().sqrt())


class Tap:
    """Keep what modules return for each sequence; with ``put``, measure and replace it.

    Args:
        names: The modules.
        put: For each sequence, what to put in place of their outputs.
        replace: False only measures.
    """

    def __init__(self, names: Sequence[str], put: Sequence[States] | None = None, *, replace: bool = True) -> None:
        self.names = list(names)
        self.states: dict[int, dict[str, Tensor]] = {}
        """By sequence, then module: what was returned, if nothing was put."""
        self.errors: dict[str, dict[int, Tensor]] = {}
        """By module, then sequence: for each token, the norm of the difference against the norm of what was put."""
        self._put = put
        self._replace = replace
        self._rows: list[tuple[int, int, slice]] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Let the block run with the tap on ``model``."""
        with attach(model, self.names, self._hook, name="parity"):
            yield

    def begin(self, rows: list[tuple[int, int, slice]]) -> None:
        """Say which row and columns of the next forward have the tokens of which sequence."""
        self._rows = rows

    def _hook(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
        stream = stream_of(module, output)
        if stream is None or stream.dim() != 3:
            return None
        if self._put is None:
            for number, row, columns in self._rows:
                self.states.setdefault(number, {})[site.name] = stream[row, columns][:-1].detach().clone()
            return None
        new = stream.clone()
        for number, row, columns in self._rows:
            rows = self._put[number].get(site.name)
            if rows is None:
                continue
            place = new[row, columns][: len(rows)]
            if place.shape != rows.shape:
                raise OptionError(
                    f"{site.name} gives {place.shape[-1]} numbers for a token in the trainer, and {rows.shape[-1]} in "
                    "the engine: they are not the same model."
                )
            rows = rows.to(new.device)
            off = (place.double() - rows.double()).norm(dim=-1)
            errors = off / rows.double().norm(dim=-1).clamp(min=1e-300)
            self.errors.setdefault(site.name, {})[number] = errors.cpu()
            place.copy_(rows)
        return with_stream(module, output, new) if self._replace else None


class Scorer:
    """Compute log-probs of given tokens with a causal language model of transformers.

    Args:
        model: The model; it is run in eval mode, and put back into the mode it was in.
        batch: So many sequences are run together.
    """

    def __init__(self, model: nn.Module, batch: int = 8) -> None:
        self.model = model
        inner: Any = unwrap(model)
        self.inner = inner
        if not hasattr(inner, "get_input_embeddings"):
            raise OptionError(
                f"A trainer's model is a causal language model of transformers, got {type(inner).__name__}."
            )
        embedding: Tensor = inner.get_input_embeddings().weight
        self.device, self.dtype, self.vocabulary = embedding.device, embedding.dtype, int(embedding.shape[0])
        self.batch = batch
        roles = find_roles(model)
        self.blocks = roles.get("resid", [])
        self.embedding = (roles.get("embed") or [""])[0]
        self.norm = (roles.get("final_norm") or [""])[0]
        self.head = (roles.get("unembed") or ["lm_head"])[0]

    @property
    def sites(self) -> list[str]:
        """Return the modules whose outputs are compared: the embedding, the blocks and the last norm."""
        return [name for name in (self.embedding, *self.blocks, self.norm) if name]

    def inside(self, block: str) -> list[str]:
        """Return the modules inside of a block that hold parameters themselves, in order."""
        found = [
            (name, each)
            for name, each in self.model.named_modules()
            if name.startswith(f"{block}.") and next(each.parameters(recurse=False), None) is not None
        ]
        return [name for name, each in found if "experts" not in name]

    def score(
        self,
        answers: Sequence[Answer],
        *,
        batch: int | None = None,
        left: bool = False,
        temperature: float = 1.0,
        shift: int = 0,
        tap: Tap | None = None,
        likeliest: list[list[int]] | None = None,
    ) -> list[Tensor]:
        """Return the log-probs of the last tokens of each sequence, as many as its engine gave; float64, on the host.

        Args:
            answers: The sequences.
            batch: Another size of batches.
            left: Pad on the left.
            temperature: What logits are divided by.
            shift: Move the positions of the answers by so many.
            tap: What to read or replace meanwhile.
            likeliest: Is given the likeliest token in place of each.
        """
        size = batch or self.batch
        order = sorted(range(len(answers)), key=lambda number: -len(answers[number].ids))
        found: dict[int, Tensor] = {}
        tops: dict[int, list[int]] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), tap.on(self.model) if tap is not None else nullcontext():
                for begin in range(0, len(order), size):
                    self._run(answers, order[begin : begin + size], found, tops, left, temperature, shift, tap)
        finally:
            self.model.train(was_training)
        if likeliest is not None:
            likeliest.extend(tops[number] for number in range(len(answers)))
        return [found[number] for number in range(len(answers))]

    def _run(
        self,
        answers: Sequence[Answer],
        numbers: Sequence[int],
        found: dict[int, Tensor],
        tops: dict[int, list[int]],
        left: bool,
        temperature: float,
        shift: int,
        tap: Tap | None,
    ) -> None:
        width = len(answers[numbers[0]].ids)
        ids = torch.zeros(len(numbers), width, dtype=torch.long)
        mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
        rows = []
        for row, number in enumerate(numbers):
            answer = answers[number]
            length = len(answer.ids)
            columns = slice(width - length, width) if left else slice(0, length)
            ids[row, columns] = torch.tensor(answer.ids)
            mask[row, columns] = 1
            positions[row, columns] = torch.arange(length) + shift * (torch.arange(length) >= answer.prompt)
            rows.append((number, row, columns))
        if tap is not None:
            tap.begin(rows)
        options = {"attention_mask": mask.to(self.device), "position_ids": positions.clamp(min=0).to(self.device)}
        logits = self.model(input_ids=ids.to(self.device), use_cache=False, **options).logits
        for number, row, columns in rows:
            count = len(answers[number].logprobs)
            scored = logits[row, columns.stop - count - 1 : columns.stop - 1]
            scored = (scored if scored.dtype == torch.float64 else scored.float()) / temperature
            wanted = torch.tensor(answers[number].ids[-count:] if count else [], dtype=torch.long, device=scored.device)
            chosen = scored.gather(-1, wanted[:, None])[:, 0] - scored.logsumexp(-1)
            found[number] = chosen.double().cpu()
            tops[number] = scored.argmax(-1).tolist()

    def captured(self, answers: Sequence[Answer], names: Sequence[str]) -> tuple[list[Tensor], list[States]]:
        """Return the log-probs, and what the modules ``names`` returned for each sequence."""
        tap = Tap(names)
        scores = self.score(answers, tap=tap)
        return scores, [tap.states.get(number, {}) for number in range(len(answers))]
