"""Captured calls as a safetensors file, and back.

Takes calls by module from ``cache`` and hands them back to it. The tensors are numbered; the file's metadata holds, as
JSON, which of them stand where: names, steps, calls, and the structures they were in. Nothing is pickled, and nothing
that is read is run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.errors import CaptureError
from hookline.observe.capture.calls import NOT_ASKED, CapturedCall
from hookline.observe.capture.store import Kept
from hookline.sites.compiled.layout import Unseen

__all__ = ["read", "write"]

_KEY: Final = "hookline.capture"
_VERSION: Final = 1
_PLAIN: Final = (str, int, float, bool, type(None))
Calls: TypeAlias = dict[str, list[CapturedCall]]


def write(path: str | Path, calls: Calls) -> Path:
    """Write the calls of each module; the path."""
    from safetensors.torch import save_file

    path, tensors = Path(path), _Tensors()
    sites = [
        {"name": name, "calls": [_call_as_json(call, tensors) for call in of_module]}
        for name, of_module in calls.items()
    ]
    about = json.dumps({"version": _VERSION, "sites": sites})
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")  # so that whoever reads finds a whole file, or none
    try:
        save_file(tensors.numbered, beside, metadata={_KEY: about, "format": "pt"})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read(path: str | Path) -> Calls:
    """The calls of each module."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()} if about is not None else {}  # noqa: SIM118
    except SafetensorError as error:
        raise CaptureError(f"{path} is no safetensors file that can be read ({error}).") from error
    if about is None:
        raise CaptureError(f"{path} was not written by Cache.save(): there is no {_KEY!r} in its metadata.")
    try:
        found = json.loads(about)
        if found["version"] != _VERSION:
            raise CaptureError(f"{path} is of version {found['version']}, this hookline reads {_VERSION}; update it.")
        return {site["name"]: [_call_of_json(site["name"], call, tensors) for call in site["calls"]]
                for site in found["sites"]}  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CaptureError(f"{path} is damaged: its metadata does not fit its tensors ({error!r}).") from error


class _Tensors:
    """The tensors of a file, each once, in memory of its own, as the format wants them."""

    def __init__(self) -> None:
        self.numbered: dict[str, Tensor] = {}
        self._numbers: dict[int, str] = {}

    def add(self, tensor: Tensor, what: str) -> str:
        """The number of a tensor."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = str(len(self._numbers))
            self.numbered[number] = self._writable(tensor, what)
        return number

    def _writable(self, tensor: Tensor, what: str) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} ({tensor.layout})"
            raise CaptureError(f"The {what} is {kind}, which a safetensors file cannot hold; use index= to convert it.")
        # A copy where it is part of a larger memory, or not in order; two tensors on one memory are not let in.
        return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _call_as_json(call: CapturedCall, tensors: _Tensors) -> dict[str, Any]:
    about: dict[str, Any] = {"step": call.step, "call": call.call}
    about["output"] = _as_json(call.output, tensors, f"output of {call.name!r}")
    if "inputs" in call.kept():
        about["inputs"] = _as_json(call.inputs, tensors, f"input of {call.name!r}")
        about["kwargs"] = _as_json(call.kwargs, tensors, f"input of {call.name!r}")
    if call.takes_grads:
        about["grads"] = [_as_json(grad, tensors, f"gradient of {call.name!r}") for grad in call.grads]
    return about


def _as_json(value: Any, tensors: _Tensors, what: str) -> Any:
    """A structure as a list that says what it is: ["tensor", "3"], ["tuple", …], ["value", 1.5], …"""
    if isinstance(value, Tensor):
        return ["tensor", tensors.add(value, what)]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_as_json(item, tensors, what) for item in value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        return ["dict", *([key, _as_json(item, tensors, what)] for key, item in value.items())]
    if isinstance(value, _PLAIN):
        return ["value", value]
    kind = value.kind if isinstance(value, Unseen) else f"{type(value).__module__}.{type(value).__qualname__}"
    return ["object", kind]


def _call_of_json(name: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> CapturedCall:
    def opened(key: str) -> Kept:
        return Kept(_of_json(about[key], tensors)) if key in about else NOT_ASKED

    call = CapturedCall(name, about["step"], about["call"], opened("output"), takes_grads="grads" in about)
    call.add_inputs(opened("inputs"), opened("kwargs"))
    for grad in about.get("grads", ()):
        call.add_grad(Kept(_of_json(grad, tensors)))
    return call


def _of_json(about: list[Any], tensors: dict[str, Tensor]) -> Any:
    kind, *parts = about
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "dict":
        return {key: _of_json(item, tensors) for key, item in parts}
    if kind == "value":
        return parts[0]
    if kind == "object":
        return Unseen(str(parts[0]))
    if kind in ("tuple", "list"):
        items = [_of_json(item, tensors) for item in parts]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"unknown kind {kind!r}")
