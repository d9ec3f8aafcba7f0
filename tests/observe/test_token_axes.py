"""An index by axes is refused where the tokens of all sequences are rows, and means tokens where it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hookline as hl
from hookline.errors import CaptureError, HookReturnError

CLEAN = torch.tensor([[5, 6, 7, 8, 9, 10]])
CHANGED = 3
CORRUPTED = CLEAN.clone()
CORRUPTED[0, CHANGED] = 40
FC2 = "model.decoder.layers.0.fc2"


def make_opt() -> nn.Module:
    """Return a small OPT, whose MLP works on (batch × tokens, width)."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=50,
        hidden_size=12,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=12,
    )
    return transformers.OPTForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("target", [FC2, "role:mlp"])
@pytest.mark.parametrize("index", [(slice(None), 2), (0, 2), (slice(None), [1, 2])], ids=str)
@pytest.mark.parametrize("on", ["forward", "forward_pre"])
def test_an_index_by_axes_is_refused_where_tokens_are_rows(target: str, index: Any, on: str) -> None:
    """Without a check it takes unit 2 of every token for token 2, and gives a wrong result without a word."""
    model = make_opt()
    with (
        pytest.raises(HookReturnError, match=r"fc2' of shape \(6, (12|24)\) has no axis for the batch.*Give rows"),
        hl.patch(model, {target: hl.edits.ablate()}, index=index, on=on),
    ):
        model(CLEAN)
    if on == "forward":
        says = r"fc2', of shape \(6, 12\), has no axis for the batch.*Give rows"
        with pytest.raises(CaptureError, match=says), hl.capture(model, target, index=index):
            model(CLEAN)
        with (
            pytest.raises(CaptureError, match="no axis for the batch"),
            hl.capture(model, target, index=index, inputs=True),
        ):
            model(CLEAN)
    hl.assert_no_hooks(model)
