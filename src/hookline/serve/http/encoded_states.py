"""Hidden states on the wire: base64 in JSON, or a safetensors file that carries the JSON.

Takes states of finished requests, hands dictionaries and bytes to the routes. No pickle anywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.serve.http.error_answers import as_json

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.serve.generation_request import StatesOfLayer

__all__ = ["SAFETENSORS", "Shelf", "states_as_base64"]

SAFETENSORS = "application/vnd.safetensors"
"""What a safetensors answer is sent as."""


def states_as_base64(states: Mapping[str, StatesOfLayer]) -> dict[str, Any]:
    """Hidden states as JSON takes them.

    Recipe: ``torch.frombuffer(bytearray(base64.b64decode(it["data"])), dtype=torch.float32).reshape(it["shape"])``.
    """
    return {
        layer: {**_facts(found), "data": base64.b64encode(_raw(found.values)).decode("ascii")}
        for layer, found in states.items()
    }


class Shelf:
    """Tensors of an answer that becomes a safetensors file.

    Recipe: ``shelf = Shelf(); facts = shelf.put(0, states); body = shelf.file({"choices": [...]})``.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def put(self, index: int, states: Mapping[str, StatesOfLayer]) -> dict[str, Any]:
        """Keep the states of one answer; what JSON says of them."""
        told = {}
        for layer, found in states.items():
            name = f"{index}/{layer}"
            self._tensors[name] = found.values.contiguous()
            told[layer] = {**_facts(found), "tensor": name}
        return told

    def file(self, answer: Mapping[str, Any] | Sequence[Any]) -> bytes:
        """The file; the JSON answer is ``answer`` in its metadata."""
        from safetensors.torch import save

        return bytes(save(self._tensors, metadata={"answer": as_json(answer).decode("ascii")}))


def _facts(states: StatesOfLayer) -> dict[str, Any]:
    return {
        "dtype": str(states.values.dtype).removeprefix("torch."),
        "shape": list(states.values.shape),
        "positions": list(states.positions),
    }


def _raw(values: Tensor) -> bytes:
    import torch

    return values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
