"""Load a model and its tokenizer from a local folder, or make the model alone from its configuration.

``hookline serve --model`` and programs call `load`, and give both to `Engine`; ``hookline find`` and ``doctor`` call
`make_empty`. Nothing is downloaded, no code of the folder is run, and weights are read from safetensors alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from torch import nn

_LOCAL: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    with_tokenizer: bool = True,
) -> tuple[nn.Module, Any]:
    """Load the causal language model in a folder, in eval mode, and its tokenizer.

    Recipe::

        model, tokenizer = hookline.serve.load("models/tiny", dtype="float32", device="cpu")

    Args:
        path: The folder: ``config.json``, weights in safetensors, a tokenizer.
        dtype: ``"auto"`` is what the folder says; else ``"float32"``, ``"bfloat16"``, …
        device: CUDA if there is any, else the CPU, if None.
        with_tokenizer: False returns None in its place; prompts are token ids then.

    Raises:
        ConfigError: What is missing, or cannot be read.
        MissingPackageError: transformers is not installed.
    """
    folder = _folder(path)
    if with_tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(
            f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}); save it there with save_pretrained, or take "
            "prompts of token ids only: load(…, with_tokenizer=False), hookline serve --no-tokenizer."
        )
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    with _telling(folder) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL) if with_tokenizer else None
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **_LOCAL)
    return model.to(where).eval(), tokenizer


def make_empty(path: str | os.PathLike[str]) -> nn.Module:
    """Make the model that the ``config.json`` of a folder describes; without numbers, unless it needs them for that.

    Recipe::

        print(hookline.find(make_empty("models/tiny"), "model.layers.#"))

    Args:
        path: The folder; it needs neither weights nor a tokenizer.

    Raises:
        ConfigError: There is no such folder, or nothing can be made of its configuration.
        MissingPackageError: transformers is not installed.
    """
    folder = _folder(path)
    with _telling(folder) as transformers:
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        model = _made(_class_in(transformers, config), config)
    return model.eval()


def _class_in(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """Return the class that the folder says it was saved from; that of a causal model if it says none."""
    saved = [getattr(transformers, name, None) for name in config.architectures or ()]
    classes = [each for each in saved if isinstance(each, type) and issubclass(each, torch.nn.Module)]
    return classes[0] if classes else transformers.AutoModelForCausalLM.from_config


def _made(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            return make(config)
    except (RuntimeError, NotImplementedError):  # some read a number of a tensor while they are made
        return make(config)


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json. A model is a folder with that, weights and a tokenizer, as save_pretrained "
            "writes it; nothing is downloaded."
        )
    return folder


@contextmanager
def _telling(folder: Path) -> Iterator[Any]:
    """Give transformers to the block; what it raises there is an error of ours, of one line."""
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            f"The model in {folder} needs the transformers package: pip install 'hookline[serve]'."
        ) from error
    try:
        yield transformers
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"The model in {folder} cannot be loaded: {said}") from error
