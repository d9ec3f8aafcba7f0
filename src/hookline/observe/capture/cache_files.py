"""Write captured calls to a safetensors file, and read them back; `Cache.save` and `Cache.load` call it.

The tensors are numbered; the file's metadata says as JSON which number belongs where: names, steps, calls, and the
structures they were in. Nothing is pickled, and nothing that is read is run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.errors import CaptureError
from hookline.files import replace_file
from hookline.messages import type_name
from hookline.observe.capture.captured_calls import NOT_ASKED, CapturedCall
from hookline.observe.capture.stored_value import StoredValue
from hookline.sites.compiled.value_layout import Unseen
from hookline.tree import tensors_of

__all__ = ["read", "write"]

_KEY: Final = "hookline.capture"
_VERSION: Final = 1
_IN_PAIRS: Final = (torch.complex128, torch.complex32)
"""Dtypes that the format does not have, kept as pairs of real numbers."""
_PLAIN: Final = (str, int, float, bool, type(None))
Calls: TypeAlias = dict[str, list[CapturedCall]]


def write(path: str | Path, calls: Calls) -> Path:
    """Write the calls of each module; return the path."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path, tensors = Path(path), _FileTensors()
    if not path.parent.is_dir():
        raise CaptureError(f"{path} cannot be written: there is no folder {path.parent}. Make it before, os.makedirs.")
    if path.is_dir():
        raise CaptureError(f"{path} is a folder: give the path of a file, such as {path / 'run.safetensors'}.")
    sites = [
        {"name": name, "calls": [_call_as_json(call, tensors) for call in of_module]}
        for name, of_module in calls.items()
    ]
    about = {_KEY: json.dumps({"version": _VERSION, "sites": sites}), "format": "pt"}
    try:
        replace_file(path, lambda draft: save_file(tensors.numbered, draft, metadata=about))
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{path} could not be written ({error}).") from error
    return path


def read(path: str | Path) -> Calls:
    """Return the calls of each module."""
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise CaptureError(f"{path} is a folder: give the path of a file that Cache.save() has written.")
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


class _FileTensors:
    """The tensors of a file, each once, in memory of its own, as the format wants them."""

    def __init__(self) -> None:
        self.numbered: dict[str, Tensor] = {}
        self._numbers: dict[int, str] = {}

    def add(self, tensor: Tensor, what: str) -> str:
        """Return the number of a tensor."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = str(len(self._numbers))
            self.numbered[number] = self._writable(tensor, what)
        return number

    def _writable(self, tensor: Tensor, what: str) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} ({tensor.layout})"
            raise CaptureError(f"The {what} is {kind}, which a safetensors file cannot hold; use index= to convert it.")
        if not _has_place_for(tensor.dtype):
            name = str(tensor.dtype).removeprefix("torch.")
            raise CaptureError(f"The {what} is of {name}, which a safetensors file cannot hold; use index= to convert.")
        # Always a copy: the format takes neither two tensors on one memory, nor parts of a larger one, nor numbers
        # that torch only marks as conjugate or negative.
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return torch.view_as_real(plain) if tensor.dtype in _IN_PAIRS else plain


@functools.cache
def _has_place_for(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        save({"0": torch.empty(0, dtype=dtype)})
    except Exception:  # each version has its own for a type it does not know
        return dtype in _IN_PAIRS
    return True


def _call_as_json(call: CapturedCall, tensors: _FileTensors) -> dict[str, Any]:
    about: dict[str, Any] = {"step": call.step, "call": call.call}
    about["output"] = _as_json(call.output, tensors, f"output of {call.name!r}")
    if "inputs" in call.kept():
        about["inputs"] = _as_json(call.inputs, tensors, f"input of {call.name!r}")
        about["kwargs"] = _as_json(call.kwargs, tensors, f"input of {call.name!r}")
    if call.takes_grads:
        about["grads"] = [_as_json(grad, tensors, f"gradient of {call.name!r}") for grad in call.grads]
    return about


def _as_json(value: Any, tensors: _FileTensors, what: str, above: tuple[int, ...] = ()) -> Any:
    """Return a structure as a list that begins with its kind: ["tensor", "3"], ["tuple", …], ["value", 1.5], …"""
    if isinstance(value, Tensor):
        return ["complex" if value.dtype in _IN_PAIRS else "tensor", tensors.add(value, what)]
    if isinstance(value, _PLAIN):
        return ["value", value]
    if id(value) in above:
        raise CaptureError(f"The {what} contains itself, which no file can hold; capture a module inside of it.")
    above = (*above, id(value))
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_as_json(item, tensors, what, above) for item in value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return _mapping_as_json(value, tensors, what, above)
    return _object_as_json(value)


def _mapping_as_json(value: Mapping[Any, Any], tensors: _FileTensors, what: str, above: tuple[int, ...]) -> Any:
    odd = [key for key in value if not _is_key(key)]
    if odd and tensors_of(value):
        raise CaptureError(
            f"The {what} has tensors under keys such as {odd[0]!r}, {type_name(odd[0])}, which a file cannot hold: "
            "keys are texts, numbers, None, or tuples of these. Capture a module inside of it."
        )
    if odd:
        return _object_as_json(value)
    items = [(key, _as_json(item, tensors, what, above)) for key, item in value.items()]
    if all(isinstance(key, _PLAIN) for key in value):
        return ["dict", *([key, item] for key, item in items)]
    return ["mapping", *([_as_json(key, tensors, what), item] for key, item in items)]


def _is_key(key: Any) -> bool:
    return isinstance(key, _PLAIN) or (type(key) is tuple and all(map(_is_key, key)))


def _object_as_json(value: Any) -> Any:
    kind = value.kind if isinstance(value, Unseen) else f"{type(value).__module__}.{type(value).__qualname__}"
    return ["object", kind]


def _call_of_json(name: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> CapturedCall:
    def stored(key: str) -> StoredValue:
        return StoredValue(_of_json(about[key], tensors)) if key in about else NOT_ASKED

    call = CapturedCall(name, about["step"], about["call"], stored("output"), takes_grads="grads" in about)
    call.add_inputs(stored("inputs"), stored("kwargs"))
    for grad in about.get("grads", ()):
        call.add_grad(StoredValue(_of_json(grad, tensors)))
    return call


def _complex(tensors: dict[str, Tensor], number: str) -> Tensor:
    pairs = tensors[number]
    if not pairs.is_complex():
        if pairs.shape[-1:] != (2,) or not pairs.is_floating_point():
            raise ValueError(f"tensor {number} holds no pairs")
        tensors[number] = torch.view_as_complex(pairs)  # so that it is one tensor wherever it stands
    return tensors[number]


def _of_json(about: list[Any], tensors: dict[str, Tensor]) -> Any:
    kind, *parts = about
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "complex":
        return _complex(tensors, parts[0])
    if kind == "dict":
        return {key: _of_json(item, tensors) for key, item in parts}
    if kind == "mapping":
        return {_of_json(key, tensors): _of_json(item, tensors) for key, item in parts}
    if kind == "value":
        return parts[0]
    if kind == "object":
        return Unseen(str(parts[0]))
    if kind in ("tuple", "list"):
        items = [_of_json(item, tensors) for item in parts]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"unknown kind {kind!r}")
