"""Load a model and its tokenizer from a local folder.

``hookline serve --model`` and programs call `load`, and give both to `Engine`. Nothing is downloaded, no code of the
folder is run, and weights are read from safetensors alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import ConfigError, MissingPackageError, OptionError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["load"]

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> tuple[nn.Module, Any]:
    """Load the causal language model in a folder, in eval mode, and its tokenizer.

    Recipe::

        model, tokenizer = hookline.serve.load("models/tiny", dtype="float32", device="cpu")

    Args:
        path: The folder: ``config.json``, weights in safetensors, a tokenizer.
        dtype: ``"auto"`` is what the folder says; else ``"float32"``, ``"bfloat16"``, …
        device: CUDA if there is any, else the CPU, if None.

    Raises:
        ConfigError: What is missing, or cannot be read.
        MissingPackageError: transformers is not installed.
    """
    folder = Path(path)
    kind = _check_folder(folder)
    wanted = _dtype(dtype)
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            "Serving a model needs the transformers package: pip install 'hookline[serve]'."
        ) from error
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, use_safetensors=True, **local)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"The {kind} in {folder} cannot be loaded: {said}") from error
    return model.to(where).eval(), tokenizer


def _check_folder(folder: Path) -> str:
    """Return the kind of model in the folder; raise with what is missing."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ConfigError(f"A model is a folder with config.json, weights and a tokenizer; {folder} is {what}.")
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder} has no config.json, so that it is no folder of a model; see save_pretrained.")
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError, OSError) as error:
        raise ConfigError(f"{config} cannot be read as a JSON object: {error}") from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no weights in *.safetensors; pickled ones are not read. See save_pretrained.")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}); save it there with save_pretrained.")
    return str(kind or "model")


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(f"dtype is 'auto', 'float32', 'bfloat16' or 'float16', got {dtype!r}.")
    return found
