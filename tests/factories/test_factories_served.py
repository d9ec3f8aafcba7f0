"""Factories on hookline's own serving engine: every request's numbers are those it would have alone."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_waiting import PATIENCE
from torch import Tensor

from hookline.factories import read_export
from hookline.serve.generation_request import Finished, GenerationRequest
from hookline.serve.serving_engine import Engine

transformers = pytest.importorskip("transformers")

PROMPTS = {"short": (5, 6), "long": tuple(range(3, 14)), "middle": (9, 8, 7, 6, 5, 4)}
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def model() -> Any:
    """A random Llama of two layers."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def answers(engine: Engine) -> dict[str, list[int]]:
    """All prompts at once, four tokens each; what was answered."""
    over: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    said: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def tell(name: str, event: Any) -> None:
        if isinstance(event, Finished):
            over.put(event)
        else:
            said[name].append(event.id)

    def ask() -> None:
        for name, prompt in PROMPTS.items():
            engine.submit(GenerationRequest(name, prompt, max_tokens=4, ignore_eos=True), partial(tell, name))

    engine.between(ask).result(PATIENCE)  # between two forwards, so that all of them are in the next
    for _ in PROMPTS:
        assert over.get(timeout=PATIENCE).reason == "length"
    return said


def states_of(model: Any, tokens: list[int]) -> Tensor:
    """The outputs of the layer for one sequence, run alone and at once."""
    with torch.inference_mode():
        seen: list[Tensor] = []
        layer = model.get_submodule(LAYER)
        handle = layer.register_forward_hook(lambda _, __, out: seen.append(out if isinstance(out, Tensor) else out[0]))
        model(torch.tensor([tokens]))
        handle.remove()
    return seen[0][0]


def test_each_request_is_exported_as_if_it_were_alone(model: Any, tmp_path: Path) -> None:
    """Three prompts of different lengths in one padded batch: rows, tokens and positions are each one's own."""
    engine = Engine(model)
    engine.start()
    factory = {"hook_factory": "hookline.factories:export", "config": {"folder": str(tmp_path)}}
    engine.hooks.add({"target_modules": [LAYER], **factory})
    answers(engine)
    engine.close()
    found: dict[str, dict[int, tuple[int, Tensor]]] = {name: {} for name in PROMPTS}
    for record in read_export(tmp_path):
        assert record.module == LAYER
        assert record.phase == ("prefill" if record.positions[0] == 0 else "decode")
        for place, (token, position) in enumerate(zip(record.tokens, record.positions, strict=True)):
            assert position not in found[record.request]
            found[record.request][position] = (token, record.tensor[place])
    for name, prompt in PROMPTS.items():
        by_position = found[name]
        assert sorted(by_position) == list(range(len(prompt) + 3))  # the last token goes through no forward
        tokens = [by_position[position][0] for position in sorted(by_position)]
        assert tuple(tokens[: len(prompt)]) == prompt
        alone = states_of(model, tokens)
        for position, (_, state) in by_position.items():
            assert torch.allclose(state, alone[position], atol=1e-5)


def test_statistics_of_a_padded_batch_are_those_of_its_tokens(model: Any) -> None:
    """The largest magnitude and the mean over all real tokens, by hooks that came while the engine runs."""
    engine = Engine(model)
    engine.start()
    specs = {name: {"target_modules": [LAYER], "hook_factory": f"hookline.factories:{name}"} for name in (
        "activation_stats", "nan_alarm")}  # fmt: skip
    live = {name: engine.hooks.add(spec) for name, spec in specs.items()}
    exported: list[Tensor] = []
    handle = model.get_submodule(LAYER).register_forward_hook(
        lambda _, __, out: exported.append((out if isinstance(out, Tensor) else out[0]).clone())
    )
    answers(engine)
    handle.remove()
    metrics = engine.hooks.metrics()
    engine.close()
    tokens = sum(map(len, PROMPTS.values())) + 3 * len(PROMPTS)
    assert sum(each.shape[0] * each.shape[1] for each in exported) > tokens  # there was padding
    assert metrics[live["nan_alarm"].id][f"{LAYER}/nonfinite"] == 0
    assert metrics[live["activation_stats"].id][f"{LAYER}/absmax"] <= max(each.abs().max().item() for each in exported)
    assert all(each.errors == 0 and each.fired for each in live.values())
