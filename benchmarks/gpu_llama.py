"""Rows about a watch of what people train, on a GPU: a Llama of 1.36 billion parameters in bfloat16.

Takes the model from ``transformers``, with random weights, hands `Row`s to ``rows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_statistics import KINDS, Training, row
from measure import Row, interleave, trial
from models import Shape
from subject import Setting

import hookline as hl

__all__ = ["gpu_llama"]

BILLION = Shape("Llama", 24, 2048, 16, 32000, 4, 2048)


class LlamaTraining(Training):
    """A Llama with all that a step of training takes."""

    def __init__(self, setting: Setting) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.shape, self.device = BILLION, setting.device
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=BILLION.vocabulary, hidden_size=BILLION.width, intermediate_size=5632, use_cache=False,
            num_hidden_layers=BILLION.layers, num_attention_heads=BILLION.heads, num_key_value_heads=BILLION.heads,
        )  # fmt: skip
        with setting.device:
            self.model = LlamaForCausalLM(config).to(torch.bfloat16)
            self.tokens = torch.randint(BILLION.vocabulary, (BILLION.batch, BILLION.length))
        self.leaves = [name for name, module in self.model.named_modules() if not any(module.children())]
        self.run = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self) -> None:
        """Forward, backward, AdamW."""
        self.run(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def gpu_llama(setting: Setting) -> Iterator[Row]:
    """A watched step, eager and compiled, against the bare one."""
    training, watched = LlamaTraining(setting), LlamaTraining(setting)
    hl.watch(watched.model, watched.leaves, on=KINDS, optimizer=watched.optimizer)
    for way, target in {"eager": 1.045, "compiled": 1.06}.items():
        for each in (training, watched):
            each.run = each.model if way == "eager" else torch.compile(each.model, dynamic=False)
        pairs = (("bare", training), ("bare again", training), ("watch", watched))
        trials = [trial(name, each.step, inner=2, device=setting.device) for name, each in pairs]
        samples = interleave(trials, setting.rounds(15))
        words = f"`hl.watch` on all {len(watched.leaves)} leaf modules, forward and backward, every step"
        found = row(f"watch, Llama 1.36B step, {way}", words, training, samples, "watch", (0.0, 0.0), target)
        yield replace(found, model=f"{BILLION}, bfloat16, fused AdamW")
