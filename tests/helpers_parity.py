"""Small models, faults to plant in an engine, and rounding to bf16 by hooks, for tests of `hookline.parity`."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 200


def llama(seed: int = 0, *, layers: int = 4, width: int = 64) -> Any:
    """Return a random Llama whose logits are spread as those of a trained one."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.12,
        tie_word_embeddings=False, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    return _spread(transformers.LlamaForCausalLM(config))


def mixture(seed: int = 0) -> Any:
    """Return a random mixture of four experts, of which each token takes two."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.12, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    return _spread(transformers.MixtralForCausalLM(config))


def _spread(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
        model.model.embed_tokens.weight.normal_(0, 0.5)
    return model.eval()


def prompts(count: int = 8, seed: int = 0) -> list[list[int]]:
    """Return prompts of 6 to 20 tokens, the first of which is BOS."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 20, (count,), generator=draws).tolist()
    return [[2, *torch.randint(3, VOCABULARY, (length,), generator=draws).tolist()] for length in lengths]


# -- a model that has learned ------------------------------------------------------------------------------------


def _sentence(draws: torch.Generator) -> list[int]:
    """Return a walk on a Markov chain, five tokens and their copy, or a row of numbers; its first token says which."""

    def pick(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=draws).tolist()

    kind, start = pick(0, 3)[0], pick(0, 100)[0]
    if kind == 0:
        steps = torch.multinomial(torch.tensor([0.6, 0.25, 0.1, 0.05]), 9, replacement=True, generator=draws).tolist()
        walk = [start]
        for step in steps:  # each token has four successors, always the same
            walk.append((17 * walk[-1] + 29 * step + 5) % 100)
        return [3, *(20 + each for each in walk)]
    if kind == 1:
        words = pick(120, 180, 5)
        return [4, *words, 5, *words]
    return [6, *(180 + (start + each) % 20 for each in range(7))]


def texts(count: int = 8, seed: int = 0, low: int = 6, high: int = 30) -> list[list[int]]:
    """Return beginnings of texts in the language that `learned` has learned."""
    draws = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(low, high, (count,), generator=draws).tolist():
        text = [2]
        while len(text) < length:
            text += _sentence(draws)
        found.append(text[:length])
    return found


def learned(model: Any, *, seconds: float = math.inf, steps: int = 10**9) -> Any:
    """Train a model on the language, for so long or so many steps; its weights are no longer random."""
    began, draws = time.monotonic(), torch.Generator().manual_seed(3)
    pool = torch.tensor(texts(2000, 3, 48, 49))
    optimizer = torch.optim.AdamW(model.train().parameters(), 2e-3)
    done = 0.0
    for step in range(steps):
        ids = pool[torch.randint(len(pool), (16,), generator=draws)]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = max(step / steps, (time.monotonic() - began) / seconds)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * max(0.05, 1 - done)
        if done >= 1:
            break
    return model.eval()


# -- rounding to bf16 --------------------------------------------------------------------------------------------


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_rounded(each) for each in value)
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16).to(value.dtype) if is_number else value


def as_trainer(model: Any) -> Any:
    """Return a copy in float32 that rounds to bf16 after every module without children, and after each block."""
    return _rounding(model, lambda name, module: not list(module.children()) or name.rpartition(".")[2].isdigit())


def as_engine(model: Any) -> Any:
    """Return a copy that rounds to bf16 in other places: the outputs of matrices, parts of blocks, and blocks."""
    parts = ("self_attn", "mlp", "norm")
    return _rounding(
        model,
        lambda name, module: (
            isinstance(module, nn.Linear | nn.Embedding)
            or name.endswith(parts)
            or name.rpartition(".")[2].isdigit()
            or "expert" in name
        ),
    )


def _rounding(model: Any, rounds: Callable[[str, nn.Module], bool]) -> Any:
    made = copy.deepcopy(model)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(_rounded(weight))
    for name, module in made.named_modules():
        if name and rounds(name, module):
            module.register_forward_hook(lambda module, args, output: _rounded(output))
    return made


def exact(model: Any) -> Any:
    """Return a copy with the weights of `as_trainer` that rounds nothing."""
    return _rounding(model, lambda name, module: False)


# -- faults ------------------------------------------------------------------------------------------------------


def stale_layer(model: Any, size: float = 0.01) -> None:
    """Move all matrices of layer 2, by a part of their spread."""
    _move(model.model.layers[2].parameters(), size)


def stale_weight(model: Any, size: float = 0.03) -> None:
    """Move one matrix."""
    _move([model.model.layers[1].mlp.down_proj.weight], size)


def _move(weights: Any, size: float) -> None:
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in weights:
            if weight.dim() > 1:
                weight.add_(size * weight.std() * torch.randn(weight.shape, generator=draws))


def head_in_bf16(model: Any) -> None:
    """Round the head to bf16."""
    with torch.no_grad():
        model.lm_head.weight.copy_(_rounded(model.lm_head.weight))


def head_in_fp8(model: Any) -> None:
    """Round the head to fp8, row by row."""
    weight = model.lm_head.weight
    with torch.no_grad():
        size = weight.abs().amax(1, keepdim=True) / 448
        weight.copy_((weight / size).to(torch.float8_e4m3fn).float() * size)


def rope_base(model: Any, base: float = 14_000.0) -> None:
    """Give RoPE another base than 10,000."""
    table = model.model.rotary_emb.inv_freq
    table.copy_(1.0 / base ** (torch.arange(0, 2 * len(table), 2) / (2 * len(table))))


def decode_offset(model: Any) -> None:
    """Move the positions of decoded tokens by one."""
    forward = model.forward

    def moved(*args: Any, **options: Any) -> Any:
        if options["input_ids"].shape[1] == 1:
            options["position_ids"] = options["position_ids"] + 1
        return forward(*args, **options)

    moved.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    model.forward = moved


def temperature(model: Any, divisor: float = 0.95) -> None:
    """Divide logits, as log-probs after the temperature are."""
    model.lm_head.register_forward_hook(lambda module, args, output: output / divisor)


def swapped_experts(model: Any) -> None:
    """Exchange two experts of layer 1."""
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        for weight in experts.parameters():
            weight[[0, 1]] = weight[[1, 0]].clone()


def tied_router(model: Any, margin: float = 0.01) -> None:
    """Choose the third expert in place of the second in layer 1 where the two are nearly as likely."""

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, chosen = output
        best = logits.softmax(-1).topk(3)
        is_tie = best.values[:, 1] - best.values[:, 2] < margin * best.values[:, 1]
        chosen[is_tie, 1] = best.indices[is_tie, 2]
        return logits, weights, chosen

    model.model.layers[1].mlp.gate.register_forward_hook(choose)


class NoBos:
    """An engine that loses the first token of each prompt, and answers as if it had not."""

    def __init__(self, model: Any, length: int = 24) -> None:
        from hookline.debug.parity.sides import Request, open_engine

        self._side, self._how = open_engine(model), Request(length)

    def __call__(self, sequences: Sequence[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
        answers = self._side.ask([ids[1:] for ids in sequences], self._how)
        for ids, answer in zip(sequences, answers, strict=True):
            yield [ids[0], *answer.ids], answer.logprobs


@contextmanager
def served(model: Any) -> Iterator[str]:
    """Yield the URL of a server with this model."""
    import hookline as hl

    server = hl.serve.Server(lambda: hl.serve.Engine(model), hl.serve.Settings(model_name="m"))
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def words(folder: Any) -> None:
    """Write a tokenizer whose words are w3 to w199 into a model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"<unk>": 0, "</s>": 1, "<s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
