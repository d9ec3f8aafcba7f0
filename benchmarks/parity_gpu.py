"""Time `hookline.parity` on a GPU: a random Llama of 1B parameters in bf16 and our server, 64 sequences of 512 tokens.

    python benchmarks/parity_gpu.py [--sequences 64] [--tokens 512] [--fault head|layer|none]

Prints the report, the seconds of each stage, and one line of JSON. The target is 60 s.
"""

from __future__ import annotations

import argparse
import copy
import json
import time

import torch
import transformers

import hookline as hl


def main() -> None:
    """Build the pair, compare it, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--fault", choices=("none", "head", "layer"), default="none")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = _llama(asked.layers, asked.width, device)
    served = copy.deepcopy(trainer)
    _plant(served, asked.fault)
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 32_000, (64,), generator=draws).tolist() for _ in range(asked.sequences)]
    began, stages = time.monotonic(), []

    def note(text: str) -> None:
        stages.append((time.monotonic() - began, text))

    found = hl.parity(trainer, served, prompts, new_tokens=asked.tokens - 64, progress=note)
    seconds = time.monotonic() - began
    print(found)
    for at, text in stages:
        print(f"{at:6.1f} s  {text}")
    size = sum(weight.numel() for weight in trainer.parameters())
    row = {"parameters": size, "seconds": round(seconds, 1), "target": 60, "ok": found.ok, "sentence": found.sentence}
    print(json.dumps(row))


def _llama(layers: int, width: int, device: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), num_key_value_heads=max(1, width // 256), head_dim=64,
        max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 2.5 / width**0.5)  # logits as spread as those of a trained model
    return model.to(torch.bfloat16).eval()


def _plant(model: torch.nn.Module, fault: str) -> None:
    with torch.no_grad():
        if fault == "head":
            weight = model.lm_head.weight
            size = weight.float().abs().amax(1, keepdim=True) / 448
            weight.copy_((weight.float() / size).to(torch.float8_e4m3fn).float() * size)
        elif fault == "layer":
            for weight in model.model.layers[5].parameters():
                weight.add_(0.03 * weight.std() * torch.randn_like(weight))


if __name__ == "__main__":
    main()
