"""Digest everything that the next step of a run may depend on, and find what differs between two runs.

`StepRecorder` takes a `RunState` at the end of every step; `first_difference` compares those of two trainings.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookline.guard.rng import stream_states
from hookline.guard.torch_switches import TorchSwitches
from hookline.sites import _torch
from hookline.tree import leaves, tensors_of

__all__ = ["Difference", "RunState", "first_difference", "left_on", "run_state", "tensor_digests"]

RunState: TypeAlias = Mapping[str, bytes]
"""The digest of each thing by its name; causes stand before effects: streams, then modes, then numbers."""

_SWITCH: Final = "switch of torch: "
_BATCH: Final = "first input of the step"
_EXPLAINS: Final = (_SWITCH, _BATCH)
_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The tables of hooks that a tensor has; ``vars`` does not list them."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""The types whose ``repr`` says everything; that of other objects may have an address in it."""


@dataclass(frozen=True)
class Difference:
    """Where a training first differs from another."""

    step: int
    """The first step after which something differs, counted from 0; -1: before the first step."""
    names: tuple[str, ...]
    """What differs there, causes first: ``"random stream of torch"``, ``"weight 0.bias"``, …"""
    is_end: bool = False
    """Whether all steps are the same, and only what is left after the last differs."""

    @property
    def first(self) -> str:
        """What differs first."""
        return self.names[0]

    @property
    def where(self) -> str:
        """The step in words."""
        if self.is_end:
            return "the end"
        return "the start" if self.step < 0 else f"step {self.step}"

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.first}{more}, at {self.where}"


def run_state(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], batch: bytes | None = None) -> RunState:
    """Return the digests of random streams, torch's switches, and all that belongs to the models and optimizers.

    Args:
        models: Their modes, buffers, gradients and weights are read.
        optimizers: Their states and the settings of their groups are read.
        batch: What the step was made of, by `tensor_digests`.
    """
    with torch.no_grad():
        return dict(_digests(_things(models, optimizers, batch)))


def left_on(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the switches of torch, and how many hooks each of its tables has: of the process, modules, parameters."""
    things: list[tuple[str, Any]] = [
        ("every module", sys.modules[nn.Module.__module__]),
        ("every optimizer", sys.modules[Optimizer.__module__]),
    ]
    for model in models:
        things += [(name or "the model", module) for name, module in model.named_modules()]
        things += model.named_parameters()
    things += [(type(optimizer).__name__, optimizer) for optimizer in optimizers]
    found: dict[str, Any] = {f"{_SWITCH}{name}": value for name, value in TorchSwitches().values.items()}
    for where, thing in things:
        tables = _OF_TENSORS if isinstance(thing, Tensor) else [name for name in vars(thing) if name.endswith("_hooks")]
        for table in tables:
            if count := len(getattr(thing, table, None) or ()):
                found[f"{table.strip('_').replace('_', ' ')} on {where}"] = count
    return found


def tensor_digests(values: Any) -> bytes | None:
    """Return one digest of all tensors in ``values``; None if there are none, or they stand for others."""
    if torch.compiler.is_compiling() or _torch.in_transform():
        return None
    found = [tensor for tensor in tensors_of(values) if _torch.has_numbers(tensor)]
    with torch.no_grad():
        return b"".join(map(_tensor_digest, found)) or None


def first_difference(before: RunState, after: RunState, *, with_batch: bool = False) -> tuple[str, ...]:
    """Return the names of what differs between two states, in the order of the first; empty if nothing does.

    Two things explain a difference and are none themselves: a switch of torch, which instruments set while they look
    (anomaly detection), and the first input of a step. With hooks on that may be the sample of an instrument, so it is
    named only ``with_batch``.
    """
    names = tuple(name for name in {**before, **after} if before.get(name) != after.get(name))
    names = names if with_batch else tuple(name for name in names if name != _BATCH)
    return names if any(not name.startswith(_EXPLAINS) for name in names) else ()


def _things(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], batch: bytes | None
) -> Iterator[tuple[str, Any]]:
    for name, state in stream_states().items():
        yield name, repr(state) if isinstance(state, tuple) else state  # Python's: 625 numbers
    yield from ((f"{_SWITCH}{name}", value) for name, value in TorchSwitches().values.items())
    yield _BATCH, batch
    names: dict[int, str] = {}
    prefixed = [("" if not number else f"model {number + 1}: ", model) for number, model in enumerate(models)]
    for prefix, model in prefixed:
        for name, module in model.named_modules():
            yield f"mode of {prefix}{name or 'the model'}", module.training
        for name, buffer in model.named_buffers():
            yield f"buffer {prefix}{name}", buffer
    for prefix, model in prefixed:
        for name, parameter in model.named_parameters():
            names[id(parameter)] = f"{prefix}{name}"
            yield f"requires_grad of {prefix}{name}", parameter.requires_grad
            yield f"gradient of {prefix}{name}", parameter.grad
    for prefix, model in prefixed:
        yield from ((f"weight {prefix}{name}", parameter) for name, parameter in model.named_parameters())
    for number, optimizer in enumerate(optimizers):
        yield from _things_of(optimizer, type(optimizer).__name__ + (f" {number + 1}" if number else ""), names)


def _things_of(optimizer: Optimizer, title: str, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    state = optimizer.state
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{title}'s {key} of group {place}", value
        for number, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:  # no module has it
                name = f"parameter {number} of group {place}"
                yield f"weight {name}", parameter
            for key, value in state.get(parameter, {}).items():
                yield f"{title}'s {key} of {name}", value


def _digests(things: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
    for name, value in things:
        if type(value) in _PLAIN:
            yield name, repr(value).encode()
        elif isinstance(value, Tensor):
            yield name, _tensor_digest(value)
        else:
            found = hashlib.blake2b(digest_size=16)
            for path, leaf in leaves(value):
                found.update(path.encode())
                found.update(_leaf_bytes(leaf))
            yield name, found.digest()


def _leaf_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return _tensor_digest(leaf)
    if hasattr(leaf, "tobytes"):  # of NumPy
        return bytes(leaf.tobytes())
    return repr(leaf).encode() if type(leaf) in _PLAIN else type(leaf).__qualname__.encode()


def _tensor_digest(tensor: Tensor) -> bytes:
    """Return a digest of dtype, shape and bits; of a distributed tensor, of the part of this process."""
    if is_lazy(tensor):  # of a LazyLinear before its first forward: it has neither shape nor numbers
        return b"not there yet"
    local = _torch.local_tensor(tensor.detach())
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for part in _dense_parts(tensor.detach() if local is None else local):
        found.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return tensors that hold all numbers of one of any layout; none for one without numbers, on meta say."""
    if tensor.is_meta or not tensor.numel():
        return []
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.layout is torch.strided:
        return [tensor.resolve_conj().resolve_neg()]
    if tensor.layout is torch.sparse_coo:
        joined = tensor.coalesce()
        return [joined.indices(), joined.values()]
    return [tensor.to_dense()]
