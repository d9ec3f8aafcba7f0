"""Activation patching: find the layer and position that carry the difference between two prompts.

A clean and a corrupted prompt differ in one token. Each cell of the table runs the corrupted prompt with one activation
taken from the clean run, and shows how much of the difference between two logits is restored: 0 for nothing, 1 for all.
The model is a GPT-2 with random weights, so nothing is downloaded, and the result has no meaning of its own.

python examples/activation_patching.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import hookline as hl

LAYERS, CHANGED = 4, 2
CLEAN = torch.tensor([[11, 48, 27, 5, 33, 19, 8]])
ANSWERS = (3, 42)
"""Tokens whose logits are compared at the last position."""


def tiny_gpt2() -> GPT2LMHeadModel:
    """Four layers of width 32, the same each time."""
    torch.manual_seed(0)
    sizes = {"n_layer": LAYERS, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 64}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.1)
    return GPT2LMHeadModel(config).eval()


def logit_difference(logits: Tensor) -> float:
    """How much the model prefers the first answer."""
    first, second = ANSWERS
    return float(logits[0, -1, first] - logits[0, -1, second])


@torch.no_grad()
def recovered_by(model: GPT2LMHeadModel, corrupted: Tensor) -> Tensor:
    """How much of the clean logit difference each layer brings back at each position, (layers, positions)."""
    with hl.capture(model, "transformer.h.#") as cache:
        clean = logit_difference(model(CLEAN).logits)
    worst = logit_difference(model(corrupted).logits)
    table = torch.empty(LAYERS, CLEAN.shape[1])
    for layer in range(LAYERS):
        for position in range(CLEAN.shape[1]):
            edit = hl.edits.swap(cache, index=(slice(None), position))
            with hl.patch(model, {f"transformer.h.{layer}": edit}):
                table[layer, position] = (logit_difference(model(corrupted).logits) - worst) / (clean - worst)
    return table


def main() -> None:
    """Print the table."""
    model = tiny_gpt2()
    corrupted = CLEAN.clone()
    corrupted[0, CHANGED] = 60
    table = recovered_by(model, corrupted)
    print(f"Recovered logit difference; the prompts differ at position {CHANGED}.\n")
    print("layer     " + "".join(f"{f'pos {position}':>8}" for position in range(table.shape[1])))
    for layer, row in enumerate(table.tolist()):
        print(f"{layer:<10}" + "".join(f"{value + 0:>8.2f}" for value in row))
    hl.assert_no_hooks(model)


if __name__ == "__main__":
    main()
