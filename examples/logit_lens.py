"""A logit lens: print what a GPT-2 would predict next if it stopped after each of its blocks.

python examples/logit_lens.py

The weights are random (nothing is downloaded), so the words mean nothing. For any weights, the last row is the model's
own answer, and the answer changes from block to block.
"""

from __future__ import annotations

import torch
import transformers

import hookline as hl


def main() -> None:
    """Capture the last token behind every block, put each through the final norm and the unembedding, print a table."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.initializer_range = 0.4  # so that six random blocks disagree
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[7, 21, 3, 40, 12]])  # (B, T)

    with torch.no_grad(), hl.capture(model, "transformer.h.#", index=(slice(None), -1)) as cache:
        answer = model(prompt).logits[0, -1]  # (V,)
        lens = {
            name: model.lm_head(model.transformer.ln_f(captured.output))[0]  # (V,)
            for name, captured in cache.items()
        }

    print(cache)
    print(f"\n{'after':<16}{'says':>6}{'with':>8}{'answer':>9}{'KL to it':>10}")
    final = answer.log_softmax(-1)
    for name, logits in lens.items():
        logs = logits.log_softmax(-1)
        token = int(logs.argmax())
        distance = (final.exp() * (final - logs)).sum()
        print(f"{name:<16}{token:>6}{logs[token].exp():>8.1%}{logs[final.argmax()].exp():>9.1%}{distance:>10.3f}")
    print(f"\nThe model says {int(final.argmax())}, with {final.max().exp():.1%}.")


if __name__ == "__main__":
    main()
