"""Time `hookline.parity` on a GPU: a random Llama of 1B parameters in bf16, and the same behind our engine.

    python benchmarks/parity_gpu.py [--sequences 64] [--tokens 512] [--layers 16] [--width 2048]

Three pairs: a healthy one, one whose layer 5 is 3 % stale, and one whose head went through fp8. Prints the verdict and
the seconds of each with its stages, the report of the last, and one line of JSON. The target is 60 s a pair. Needs
torch, transformers, numpy and safetensors alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from typing import Any

import torch
import transformers

import hookline as hl


def main() -> None:
    """Build the pairs, compare them, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = _llama(asked.layers, asked.width, device)
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 32_000, (64,), generator=draws).tolist() for _ in range(asked.sequences)]
    row: dict[str, Any] = {"parameters": sum(weight.numel() for weight in trainer.parameters()), "target": 60}
    for fault, where in (("none", None), ("layer", f"model.layers.{asked.layers // 3}"), ("head", "lm_head")):
        served = copy.deepcopy(trainer)
        _plant(served, where)
        found, seconds, stages = _compared(trainer, served, prompts, asked.tokens - 64)
        named = found.cause.where if found.cause else None
        is_right = found.ok if where is None else named is not None and named.startswith(where)
        print(f"{fault}: {seconds:.1f} s, {'as planted' if is_right else 'WRONG'}: {found.sentence}")
        print("\n".join(stages))
        row[fault] = {"seconds": round(seconds, 1), "is_right": is_right, "times": round(found.times, 2)}
    print(found)
    print(json.dumps(row))


def _compared(trainer: Any, served: Any, prompts: list[list[int]], new_tokens: int) -> tuple[Any, float, list[str]]:
    """Return what was found, the seconds, and a line for each stage."""
    began = time.monotonic()
    stages: list[tuple[float, str]] = []

    def note(text: str) -> None:
        stages.append((time.monotonic(), text))

    found = hl.parity(trainer, served, prompts, new_tokens=new_tokens, progress=note)
    note("")
    lines = [f"  {until - at:6.1f} s  {text}" for (at, text), (until, _) in itertools.pairwise(stages)]
    return found, stages[-1][0] - began, lines


def _llama(layers: int, width: int, device: str) -> Any:
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


@torch.no_grad()
def _plant(model: Any, where: str | None) -> None:
    if where == "lm_head":
        weight = model.lm_head.weight
        size = weight.float().abs().amax(1, keepdim=True) / 448
        weight.copy_((weight.float() / size).to(torch.float8_e4m3fn).float() * size)
    elif where is not None:
        for weight in model.get_submodule(where).parameters():
            weight.add_(0.03 * weight.std() * torch.randn_like(weight))


if __name__ == "__main__":
    main()
