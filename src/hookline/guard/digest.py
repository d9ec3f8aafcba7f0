"""Digest tensors and the state of a run, so that two moments or two runs can be compared to the last bit.

The audit of hooks (debug/audit), ``check_hook`` (testing/checking.py), ``replay_check`` (debug/first_bad) and the check
of written checkpoints (runs/session.py) compare by `run_digest`, `digest` and `changed`. ``compare`` (of caches and
dictionaries, debug/compare/values.py) and the precision checker (debug/precision) call `dense`.

The order of `_things` is part of the result: causes come before effects, as the audit names the first difference as the
cause. The beginnings of the names are read elsewhere: "weight " in testing/checking.py, "random stream" (written by
`_spoken` of guard/rng.py) and `SWITCH` in debug/first_bad/replay_check.py, `SWITCH` in the audit. docs/audit.md shows
such names. No file holds digests, so how they are made may change. Tests: tests/guard/test_digest.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookline.guard.guard import TorchSwitches
from hookline.guard.rng import stream_states
from hookline.sites import _torch
from hookline.tree import leaves

RunDigest: TypeAlias = Mapping[str, bytes]
"""The digest of each thing by its name; causes stand before effects: streams, switches, modes, then numbers."""

SWITCH: Final = "switch of torch: "
"""What the names of torch's switches begin with."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""The types whose ``repr`` says everything; that of other objects may have an address in it."""


def dense(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor as a plain one, on its device; None if it has none.

    Of a distributed tensor that is the part of this process, of a sparse one zeros too, of a nested one the parts one
    after the other, of a quantized one what its numbers stand for. Parameters that are not made yet, and tensors on the
    meta device or inside of a transform, have no numbers.
    """
    if is_lazy(tensor) or not _torch.has_numbers(tensor) or tensor.is_meta:
        return None
    plain = tensor.detach()
    if hasattr(plain, "to_local"):
        plain = plain.to_local()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.is_nested:
        is_jagged = plain.layout is torch.jagged
        plain = plain.values() if is_jagged else torch.cat([part.flatten() for part in plain.unbind()])
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.resolve_conj().resolve_neg()  # a lazily conjugated tensor has other bytes than numbers


def digest(value: Any) -> bytes:
    """Return a digest of dtype, shape and bits of a tensor; of containers, that of all that is in them.

    Of an object of another class only the name of the class counts: two of them are always equal.
    """
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(value):
        found.update(path.encode())
        found.update(_of_leaf(leaf))
    return found.digest()


def _of_leaf(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return _of_tensor(leaf)
    if hasattr(leaf, "tobytes"):  # an array or a number of NumPy
        return f"{getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')}".encode() + bytes(leaf.tobytes())
    return repr(leaf).encode() if type(leaf) in _PLAIN else type(leaf).__qualname__.encode()


def _of_tensor(tensor: Tensor) -> bytes:
    with torch.no_grad():
        numbers = dense(tensor)
        if numbers is None:
            return b"no numbers"
        found = hashlib.blake2b(f"{tensor.dtype} {tuple(numbers.shape)}".encode(), digest_size=16)
        if numbers.numel():
            found.update(numbers.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def run_digest(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], others: Mapping[str, Any] | None = None
) -> RunDigest:
    """Return the digests of random streams, torch's switches, and all that belongs to the models and optimizers.

    Args:
        models: Their modes, buffers, gradients and weights are read.
        optimizers: Their states and the settings of their groups are read.
        others: Whatever else the next step may depend on, by name.
    """
    return {name: digest(value) for name, value in _things(models, optimizers, others or {})}


def changed(before: RunDigest, after: RunDigest) -> list[str]:
    """Return the names of what differs, in the order of ``before``; what only one has differs."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _things(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], others: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    for name, state in stream_states().items():
        # The state of Python's stream is a tuple of 625 numbers, which would be digested one by one.
        yield name, repr(state) if isinstance(state, tuple) else state
    yield from ((f"{SWITCH}{name}", value) for name, value in TorchSwitches().values.items())
    yield from others.items()
    prefixed = [("" if not number else f"model {number + 1}: ", model) for number, model in enumerate(models)]
    for prefix, model in prefixed:
        for name, module in model.named_modules():
            yield f"mode of {prefix}{name or 'the model'}", module.training
        for name, buffer in model.named_buffers():
            yield f"buffer {prefix}{name}", buffer
    names: dict[int, str] = {}
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
