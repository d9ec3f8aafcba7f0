"""`hookline.parity` with vLLM in this process and over HTTP: a clean pair, and a stale layer that its states name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_vllm import TOKEN, VllmServer, running_engine

import hookline as hl
from hookline.engines.vllm import engine_options

PROMPTS = [[2, *range(5 + n, 12 + 2 * n)] for n in range(6)]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    with running_engine(tiny, **engine_options()) as found:
        yield found


def test_a_clean_pair_is_called_clean(llm: Any, reference: Any) -> None:
    found = hl.parity(reference, llm, PROMPTS, new_tokens=12)
    assert found.ok, str(found)
    assert found.layers
    assert "raw_logprobs" in found.facts["logprobs_mode"]
    assert found.other_likeliest == 0


def _stale(reference: Any, layer: int, engine: Any) -> Any:
    """Compare while a weight of the trainer is another."""
    weight = reference.model.layers[layer].mlp.down_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.add_(0.01 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        return hl.parity(reference, engine, PROMPTS, new_tokens=12)
    finally:
        weight.data.copy_(kept)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_stale_layer_is_named_by_its_states(llm: Any, reference: Any, layer: int) -> None:
    found = _stale(reference, layer, llm)
    assert not found.ok
    assert found.cause.where == f"model.layers.{layer}.mlp.down_proj", str(found)


def test_over_http(server: VllmServer, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not tell its mode of log-probs: it is found out."""
    monkeypatch.setenv("HOOKLINE_SERVE_TOKEN", TOKEN)
    found = hl.parity(reference, server.url, PROMPTS, new_tokens=12, temperature=0.8)
    assert found.ok, str(found)
    assert found.layers
    assert "raw" in found.facts["logprobs_mode"]
    stale = _stale(reference, 2, server.url)
    assert stale.cause.where == "model.layers.2.mlp.down_proj", str(stale)
