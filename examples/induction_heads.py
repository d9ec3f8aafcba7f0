"""Train a small model on texts that repeat, and find, draw and ablate the heads that make it notice.

    python examples/induction_heads.py

Two layers work together: a head of the first moves what stood before each token to that token; heads of the second look
for the token that stood behind an earlier copy of this one. Takes half a minute, and writes ``heads.svg`` if matplotlib
is installed.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import hookline as hl

TOKENS, LENGTH, PERIOD = 24, 32, 9


def texts(count: int, *periods: int) -> tuple[Tensor, Tensor]:
    """Return random texts that repeat after one of ``periods``, and which of their tokens can be known."""
    period = torch.tensor(periods)[torch.randint(len(periods), (count, 1))]
    text = torch.randint(0, TOKENS, (count, LENGTH)).gather(1, torch.arange(LENGTH) % period)
    return text, torch.arange(1, LENGTH) >= period


def loss_on(model: GPT2LMHeadModel, text: Tensor, known: Tensor) -> Tensor:
    return cross_entropy(model(text).logits[:, :-1][known], text[:, 1:][known])


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(1000):
        optimizer.zero_grad()
        loss = loss_on(model, *texts(64, *range(6, 15)))
        loss.backward()
        optimizer.step()
        if loss < 0.4:
            break
    model.eval().requires_grad_(False)

    text, known = texts(64, PERIOD)
    with hl.capture(model, role="pattern") as cache:
        plain = float(loss_on(model, text, known))
    patterns = cache.stack("pattern")  # (layers, texts, heads, from, to)
    before = patterns.diagonal(offset=-1, dim1=-2, dim2=-1).mean((1, 3))
    behind = patterns.diagonal(offset=1 - PERIOD, dim1=-2, dim2=-1)[..., 1:].mean((1, 3))
    print("how much each head looks at")
    for layer in range(2):
        rows = "   ".join(f"{a:.2f} {b:.2f}" for a, b in zip(before[layer], behind[layer], strict=True))
        print(f"  layer {layer}: the token before, and behind the copy   {rows}")
    previous, induction = divmod(int(before.argmax()), 4), divmod(int(behind.argmax()), 4)
    print(f"the head that moves tokens on is in layer {previous[0]}, the best induction head in layer {induction[0]}")

    costs = torch.zeros(2, 4)
    for layer in range(2):
        for head in range(4):
            with hl.patch(model, hl.edits.ablate(head=head), role="z", layer=layer):
                costs[layer, head] = loss_on(model, text, known) - plain
    others = largest_but(costs, previous)
    print(f"without the first the loss rises by {costs[previous]:.1f}, without another head by at most {others:.1f}")
    assert (previous[0], induction[0]) == (0, 1)
    assert costs[previous] > 2 * others
    if find_spec("matplotlib") is not None:
        maps = [
            hl.observe.HeatMap(patterns[place[0], 0, place[1]], title=f"layer {place[0]}, head {place[1]}")
            for place in (previous, induction)
        ]
        maps[0].save(Path(tempfile.mkdtemp()) / "heads.svg", maps[1])


def largest_but(costs: Tensor, place: tuple[int, int]) -> float:
    """Return the largest of the costs, but for one head."""
    others = costs.clone()
    others[place] = -torch.inf
    return float(others.max())


if __name__ == "__main__":
    main()
