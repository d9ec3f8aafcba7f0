"""Train a probe offline, serve it online: answers say which tokens it flagged, and a stop ends one of them.

A random Llama reads random tokens; the probe learns from one layer which tokens are vowels of a made-up alphabet. Then
the model is served for three requests at once. Needs hookline[serve].

python examples/probe.py
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hookline as hl
from hookline.factories import train_probe
from hookline.serve.generation_request import Event, Finished, GenerationRequest
from hookline.serve.serving_engine import Engine

VOWELS = torch.tensor([3, 17, 29])
"""The tokens that the probe is to know."""


def random_llama() -> LlamaForCausalLM:
    """Return a model of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=60, **sizes, max_position_embeddings=128, initializer_range=0.05)
    config.bos_token_id = config.eos_token_id = None
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def train(model: LlamaForCausalLM, file: Path) -> str:
    """Train on the activations of one layer and write the probe; return the name of the layer."""
    layer = hl.find(model, role="resid").names[0]
    ids = torch.randint(60, (256, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), hl.capture(model, layer, detach=True) as cache:
        model(ids)
    head = train_probe(cache[layer].output, torch.isin(ids, VOWELS), hidden=16, weight_decay=1e-4)
    head.save(file)
    print(f"offline: {head.facts['rows']} tokens of {layer}, held-out accuracy {head.facts['held_out_accuracy']:.4f}")
    return layer


def serve(model: LlamaForCausalLM, spec: dict[str, Any]) -> None:
    """Answer three requests at once with the probe attached."""
    engine = Engine(model)
    engine.start()
    live = engine.hooks.add(spec)
    prompts = {"no vowel": (5, 6, 7), "one vowel": (5, 3, 7), "two": (17, 8, 29)}
    waiting = {name: threading.Event() for name in prompts}
    ends: dict[str, Finished] = {}

    def listen(name: str) -> Any:
        def on_event(event: Event) -> None:
            if isinstance(event, Finished):
                ends[name] = event
                waiting[name].set()

        return on_event

    for name, prompt in prompts.items():
        engine.submit(GenerationRequest(name, prompt, max_tokens=6), listen(name))
    for name in prompts:
        waiting[name].wait()
        flags = ", ".join(f"{each.tokens} tokens from position {each.position}" for each in ends[name].flags)
        print(f"  {name}: {ends[name].completion_tokens} tokens, {ends[name].reason}; flagged: {flags or 'none'}")
    print(f"  metrics: {live.hook.to_metrics()}")
    engine.close()


def main() -> None:
    """Train, then serve with flags, then with a probe that ends answers."""
    model = random_llama()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vowels.safetensors"
        spec = {"target_modules": [train(model, file)], "hook_factory": "hookline.factories:probe"}
        for action in ("flag", "stop"):
            print(f"online, action {action!r}:")
            serve(model, {**spec, "config": {"file": str(file), "name": "vowels", "action": action}})


if __name__ == "__main__":
    main()
