"""Models that tests of several folders share: toy modules, and tiny random Hugging Face models with a batch each.

Nothing is downloaded, and transformers is imported by the models that need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "MODELS",
    "Args",
    "Broken",
    "Fn",
    "Scale",
    "assert_same_grads",
    "batch_for",
    "build",
    "leaf",
    "logger",
    "loss_of",
    "make",
    "mlp",
    "twin",
    "twin_of",
]

_TEXT: dict[str, Any] = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
_LAYERS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {**_LAYERS, "vocab_size": 31, "max_position_embeddings": 16, "num_labels": 3}
_TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_TEXT, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_TEXT,
            **_LAYERS,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        },
    ),
    "bert": ("BertConfig", "BertModel", _BERT),
    "bert_classifier": ("BertConfig", "BertForSequenceClassification", _BERT),
    "bert_language": ("BertConfig", "BertForMaskedLM", _BERT),
    "vit": ("ViTConfig", "ViTForImageClassification", {**_LAYERS, "image_size": 8, "patch_size": 4, "num_labels": 3}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 31,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 2,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": 31,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "time_step_rank": 4,
            "pad_token_id": 0,
        },
    ),
}
"""For each tiny model: the class of its configuration, its own, and the options."""


def build(name: str, **changes: Any) -> nn.Module:
    """The tiny model of that name with random weights; ``changes`` are options that replace the usual ones."""
    import transformers

    config_class, model_class, options = _TINY[name]
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**{**options, **changes}))


MODELS = {name: functools.partial(build, name) for name in _TINY if name != "bert_language"}


def make(name: str, **changes: Any) -> nn.Module:
    """The model of that name, the same weights each time, in evaluation mode; ``changes`` as for `build`."""
    torch.manual_seed(0)
    return build(name, **changes).eval()


def twin_of(name: str, model: nn.Module) -> nn.Module:
    """Another model with the weights of this one and nothing else in common."""
    twin = make(name)
    twin.load_state_dict(model.state_dict())
    return twin


def batch_for(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments for one call that returns a loss (BertModel: its hidden states)."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 31, (2, 6), generator=random)
    labels = torch.randint(0, 3, (2,), generator=random)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=random), "labels": labels}
    if name == "bert":
        return {"input_ids": ids}
    if name == "bert_classifier":
        return {"input_ids": ids, "labels": labels}
    if name == "t5":
        return {"input_ids": ids, "labels": torch.randint(2, 31, (2, 5), generator=random)}
    return {"input_ids": ids, "labels": ids}


def loss_of(output: Any) -> Tensor:
    """The loss of an output, or something to differentiate where it has none."""
    if output.get("loss") is not None:
        return output["loss"]
    return output["last_hidden_state"].square().mean() + output["pooler_output"].square().mean()


class Scale(nn.Module):
    """Multiplies by a number; a stand-in for any module whose arithmetic is easy to follow."""

    def __init__(self, factor: float = 5.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return x * self.factor


class Args(nn.Module):
    """Returns the arguments it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


class Broken(nn.Module):
    """A forward that ends with the given exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error


class Fn(nn.Module):
    """A module around any function, so that a test can say in one line what its forward does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def mlp() -> nn.Sequential:
    """Three layers, 3 to 5 to 2, the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def leaf(*shape: int, seed: int = 1) -> Tensor:
    """A random tensor that needs a gradient, the same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def twin(tensor: Tensor) -> Tensor:
    """Another leaf with the same numbers."""
    return tensor.detach().clone().requires_grad_()


def logger(events: list[Any], label: Any) -> Callable[..., None]:
    """A hook for any kind that notes its label and returns nothing."""

    def hook(*_: Any) -> None:
        events.append(label)

    return hook


def assert_same_grads(model: nn.Module, reference: nn.Module) -> None:
    """Fail unless the parameters of both have the same gradients to the last bit."""
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name
