"""The methods of docs/recipes/models.md, each in at most twelve lines, on all twelve families of transformers.

What a family does not have is told by an error: BERT has no last norm to read the residual stream by.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hookline as hl
from hookline.errors import NoMatchError
from hookline.factories import train_probe

sys.path.insert(0, str(Path(__file__).parent / "sites"))
from test_attention import FAMILIES, _model

MOST_LINES = 12


class Case:
    """A model, a text, and another text that differs in one token."""

    def __init__(self, family: str) -> None:
        self.model = _model(family, "eager" if family == "Gemma2" else "sdpa").requires_grad_(False)
        self.clean = torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(1))
        self.corrupted = self.clean.clone()
        self.corrupted[0, 2] = 61
        self.folder = Path()
        self.has_decoder = family == "T5"
        self.blocks = [*range(3, 6)] if self.has_decoder else [*range(3)]  # of T5, those of its decoder

    def logits(self, tokens: Tensor) -> Tensor:
        """Return those of the last token."""
        given = {"decoder_input_ids": tokens} if self.has_decoder else {}
        return self.model(tokens, **given).logits[0, -1]

    def preference(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return logits[7] - logits[8]


def logit_lens(case: Case) -> Tensor:
    with hl.capture(case.model, role="resid") as cache:
        answer = case.logits(case.clean)
    norm, head = (hl.find(case.model, role=role)[-1].module for role in ("final_norm", "unembed"))
    lens = torch.stack([head(norm(cache["resid", block].tensor[0, -1])) for block in case.blocks])
    # T5 scales, and Gemma 2 caps, what the norm returns: the order of tokens is the model's.
    assert lens[-1].argmax() == answer.argmax()
    return lens


def direct_logit_attribution(case: Case) -> Tensor:
    norm, head = (hl.find(case.model, role=role)[-1].module for role in ("final_norm", "unembed"))
    with hl.capture(case.model, ["role:attn_out", "role:resid"]) as cache:
        answer = int(case.logits(case.clean).argmax())

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if isinstance(norm, torch.nn.LayerNorm) else x

    last = cache["resid", -1].tensor[0, -1]
    scale = (norm(last) - getattr(norm, "bias", 0)) / centred(last)
    added = torch.stack([cache["attn_out", block].output[0, :, -1] for block in case.blocks])
    return centred(added) * scale @ head.weight[answer]


def patching_over_positions(case: Case) -> Tensor:
    with hl.capture(case.model, role="resid") as cache:
        best = case.preference(case.clean)
    worst, effects = case.preference(case.corrupted), torch.zeros(3, 6)
    for row, block in enumerate(case.blocks):
        for position in range(6):
            edit = hl.edits.swap(cache, index=(slice(None), position))
            with hl.patch(case.model, edit, role="resid", layer=block):
                effects[row, position] = (case.preference(case.corrupted) - worst) / (best - worst)
    return effects


def patching_over_heads(case: Case) -> Tensor:
    with hl.capture(case.model, role="z") as cache:
        best = case.preference(case.clean)
    worst, effects = case.preference(case.corrupted), torch.zeros(3, 4)
    for row, block in enumerate(case.blocks):
        for head in range(4):
            with hl.patch(case.model, hl.edits.swap(cache, head=head), role="z", layer=block):
                effects[row, head] = (case.preference(case.corrupted) - worst) / (best - worst)
    return effects


def attribution_patching(case: Case) -> Tensor:
    with hl.capture(case.model, role="z") as there:
        best = case.preference(case.clean)
    graph = {"role:embed": lambda embedded: embedded.detach().requires_grad_()}
    with hl.patch(case.model, graph), hl.capture(case.model, role="z", grads=True) as here:
        worst = case.preference(case.corrupted)
        worst.backward()
    pairs = [(there["z", block].output, here["z", block]) for block in case.blocks]
    effects = torch.stack([((a - b.output) * b.grad).sum((0, 2, 3)) for a, b in pairs]) / (best - worst)
    real = patching_over_heads(case)
    assert torch.corrcoef(torch.stack([effects.flatten(), real.flatten()]).detach())[0, 1] > 0.9
    return effects


def attention_patterns(case: Case) -> Tensor:
    with hl.capture(case.model, role="pattern") as cache:
        case.logits(case.clean)
    pattern = cache["pattern", case.blocks[0]].output[0]
    return pattern.sum(-1)


def head_ablation(case: Case) -> Tensor:
    plain, moved = case.logits(case.clean).log_softmax(-1), torch.zeros(3, 4)
    for row, block in enumerate(case.blocks):
        for head in range(4):
            with hl.patch(case.model, hl.edits.ablate(head=head), role="z", layer=block):
                ablated = case.logits(case.clean).log_softmax(-1)
            moved[row, head] = (plain.exp() * (plain - ablated)).sum()
    assert (moved > -1e-6).all()  # nats; never below zero but for rounding
    return moved


def steering(case: Case) -> Tensor:
    with hl.capture(case.model, role="resid", layer=case.blocks[1]) as cache:
        case.logits(case.clean), case.logits(case.corrupted)
    one, other = (call.tensor for call in cache["resid", case.blocks[1]].calls)
    with hl.patch(case.model, hl.edits.steer((one - other)[0, 2], 4.0), role="resid", layer=case.blocks[1]):
        steered = case.logits(case.corrupted)
    assert not torch.allclose(steered, case.logits(case.corrupted))
    return steered


def probing(case: Case) -> Tensor:
    tokens = torch.randint(3, 60, (16, 6), generator=torch.Generator().manual_seed(2))
    with hl.capture(case.model, role="resid", layer=0) as cache:
        case.model(tokens, **({"decoder_input_ids": tokens} if case.has_decoder else {}))
    hidden = cache["resid", 0].tensor
    probe = train_probe(hidden, tokens < 30)
    assert probe.facts["held_out_accuracy"] > 0.5
    return probe.scores(hidden[0])


def induction_scores(case: Case) -> Tensor:
    text = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    with hl.capture(case.model, role="pattern") as cache:
        case.logits(text)
    patterns = torch.stack([cache["pattern", block].output for block in case.blocks])
    return patterns.diagonal(offset=-6, dim1=-2, dim2=-1)[..., 1:].mean((1, 3))


RECIPES: tuple[Callable[[Any], Tensor], ...] = (
    logit_lens,
    direct_logit_attribution,
    patching_over_positions,
    patching_over_heads,
    attribution_patching,
    attention_patterns,
    head_ablation,
    steering,
    probing,
    induction_scores,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recipes_run_on_a_family(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = Case(family)
    case.folder = tmp_path
    for recipe in RECIPES:
        if family == "Bert" and recipe in (logit_lens, direct_logit_attribution):
            with pytest.raises(NoMatchError, match="final_norm"):
                recipe(case)
        else:
            assert recipe(case).isfinite().all(), recipe.__name__
    hl.assert_no_hooks(case.model)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_a_recipe_has_at_most_twelve_lines(recipe: Any) -> None:
    lines = inspect.getsource(recipe).splitlines()[1:]
    assert len([line for line in lines if line.strip() and not line.strip().startswith(("#", "assert"))]) <= MOST_LINES
