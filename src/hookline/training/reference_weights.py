"""Reference weights out of a file: of a run of hookline, of safetensors, of torch.

Takes a path from a user or from `HookManager`, hands back tensors by parameter, on the CPU. A checkpoint of hookline
holds numbered tensors, and in its metadata a tree in JSON that says what each is; only the model's are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hookline.errors import CheckpointError

__all__ = ["read_weights"]

_KEY: Final = "hookline.checkpoint"
_WAY: Final = ("core", "model", "tensors")
"""Where the weights are in the tree of a checkpoint."""


def read_weights(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The weights in a file; of a folder with checkpoints, or of a run's folder, those of the newest.

    Recipe::

        reference = read_weights("runs/mod_arithmetic/random")
        hookline.HookManager(["gradient_projection"], reference_weights=reference, sinks=[...])
    """
    path = Path(path)
    if path.is_dir():
        path = _newest(path)
    if path.suffix != ".safetensors":
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        inner = found.get("model")  # a checkpoint with other things beside
        return inner if isinstance(inner, Mapping) else found
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        about = file.metadata() or {}
        if _KEY not in about:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = about[_KEY] or bytes(file.get_tensor("tree").numpy()).decode("ascii")
        return {name: file.get_tensor(number) for name, number in _numbers(text, path).items()}


def _newest(folder: Path) -> Path:
    found = sorted([*folder.glob("*.safetensors"), *folder.glob("checkpoints/*.safetensors")], key=lambda p: p.name)
    if not found:
        raise CheckpointError(f"{folder} has no checkpoints in it (*.safetensors). Name the file itself.")
    return found[-1]


def _numbers(text: str, path: Path) -> dict[str, str]:
    """The number of each weight. In the tree a dictionary is ["dict", {…}], and a tensor ["tensor", number, …]."""
    try:
        node: Any = json.loads(text)
        for key in _WAY:
            node = node[1][key]
        return {name: str(entry[1]) for name, entry in node[1].items() if entry[0] == "tensor"}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} is a checkpoint, and has no weights where they should be ({error}).") from error
