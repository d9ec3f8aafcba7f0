"""Steering: train a vector that makes a frozen model prefer one token, then generate with it.

The vector is added to one layer, at the last position. It gets gradients like any parameter; the weights do not change.
The model is a GPT-2 with random weights, so nothing is downloaded.

python examples/steering.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import hookline as hl

WANTED = 42
SITE = "transformer.h.1"
LAST = (slice(None), -1)


def tiny_gpt2() -> GPT2LMHeadModel:
    """Three layers of width 32, the same each time."""
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 32, "vocab_size": 64}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def train_vector(model: GPT2LMHeadModel, prompts: torch.Tensor, steps: int = 60) -> torch.Tensor:
    """A vector that, added at the last position, makes the wanted token the next one."""
    vector = torch.zeros(32, requires_grad=True)
    optimizer = torch.optim.Adam([vector], lr=0.1)
    wanted = torch.full((len(prompts),), WANTED)
    with hl.patch(model, {SITE: hl.edits.steer(vector, index=LAST)}):
        for step in range(steps):
            loss = cross_entropy(model(prompts).logits[:, -1], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step:>2}  loss {loss.item():.3f}")
    return vector.detach()


def main() -> None:
    """Train the vector, then generate with more and more of it."""
    model = tiny_gpt2()
    vector = train_vector(model, torch.randint(1, 64, (16, 6)))
    prompt = torch.randint(1, 64, (1, 6))
    for k in (0.0, 0.5, 1.0):
        with hl.patch(model, {SITE: hl.edits.steer(vector, k, index=LAST)}):
            tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        print(f"k={k}  {tokens[0, 6:].tolist()}")


if __name__ == "__main__":
    main()
