"""The engine on a GPU: hidden states that leave it while the model goes on are those of a run alone."""

from __future__ import annotations

import random

import pytest
import torch
from helpers_serve import Answer, alone, small_model, started, states_alone

from hookline.engines.request_options import StatesWanted
from hookline.serve.generation_request import GenerationRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

LAYERS = ("model.layers.0", "model.layers.3")


@pytest.fixture(scope="module")
def model():
    size = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
    return small_model("Llama", **size, **heads, initializer_range=0.1).cuda()


def test_states_and_answers_on_a_gpu_are_those_of_a_run_alone(model) -> None:
    """Sixteen requests of different lengths that join and leave, every other with the states of two layers."""
    rng = random.Random(0)
    engine = started(model)
    asked = []
    for index in range(16):
        prompt = tuple(rng.randrange(2000) for _ in range(rng.randrange(1, 60)))
        answer = Answer()
        states = StatesWanted(LAYERS) if index % 2 else None
        engine.submit(GenerationRequest(f"r{index}", prompt, max_tokens=5 + 4 * index, states=states), answer)
        asked.append((prompt, answer))
    for _, answer in asked:
        answer.wait()
    engine.close()
    for index, (prompt, answer) in enumerate(asked):
        assert answer.ids == alone(model, prompt, 5 + 4 * index)
        for name in LAYERS if index % 2 else ():
            found = answer.finished.states[name]
            assert found.values.device.type == "cpu"
            assert found.positions == list(range(len(prompt) + len(answer.ids) - 1))
            expected = states_alone(model, [*prompt, *answer.ids[:-1]], name)
            torch.testing.assert_close(found.values, expected, rtol=1e-3, atol=1e-3)


def test_a_seed_decides_on_a_gpu_too_and_leaves_its_random_stream_alone(model) -> None:
    """Draws are made on the host."""
    engine = started(model)
    before = torch.cuda.get_rng_state()
    answers = [Answer(), Answer()]
    for index, answer in enumerate(answers):
        request = GenerationRequest(f"r{index}", (5, 6, 7), max_tokens=30, temperature=0.8, top_p=0.9, seed=3)
        engine.submit(request, answer)
    assert answers[0].wait().ids == answers[1].wait().ids
    engine.close()
    assert torch.equal(before, torch.cuda.get_rng_state())
