"""Check the metrics that hooks return, and bring their tensors to the host.

`Firing` calls `add_metrics` when a hook returns; `MetricOutput` calls `to_host` before a record goes to the sinks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.errors import MetricError
from hookline.messages import type_name
from hookline.observe.host_values import on_host

__all__ = ["PLAIN", "add_metrics", "copy_metric", "to_host"]

PLAIN: Final = frozenset({float, int, bool, str, type(None)})
"""Types that every sink can write as they are."""


def add_metrics(hook: str, found: Any, into: dict[str, Any]) -> None:
    """Add what `hook` returned to `into` as ``"hook/metric"``; raise for a value that no sink can write."""
    if found is None:
        return
    if type(found) is not dict and not isinstance(found, Mapping):
        raise MetricError(
            f"Hook {hook!r} returned {type_name(found)}; metrics are a dictionary of numbers by name, or None."
        )
    # All or nothing: a bad metric leaves none of its neighbours behind.
    into.update(
        {
            f"{hook}/{name}" if type(name) is str else _key(hook, name): value
            if type(value) in PLAIN
            else copy_metric(value, hook, name)
            for name, value in found.items()
        }
    )


def copy_metric(value: Any, hook: str, name: str) -> Any:
    """Return `value` as it is now, with copies of tensors, still on their device.

    ``hook`` is the name of the hook, or of the function (``"record()"``), that the error names.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):  # ranks hold it in parts, or have not added it up
            value = value.full_tensor()
        # A copy: it may be a parameter, a buffer, or a view of one, which the run goes on to change.
        return _checked_tensor(value, hook, name).detach().clone()
    if isinstance(value, Mapping):
        return {_sub_key(key, hook, name): copy_metric(item, hook, name) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [copy_metric(item, hook, name) for item in value]
    if isinstance(value, Real | str):
        return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)
    if isinstance(value, np.ndarray | np.bool_):
        return copy_metric(value.tolist(), hook, name)
    raise _unwritable(hook, name, type_name(value))


def _unwritable(hook: str, name: str, found: str) -> MetricError:
    who = f"{hook} was given" if hook.endswith("()") else f"Hook {hook!r} returned"
    return MetricError(
        f"{who} {found} as {name!r}, which no sink can write; return numbers, tensors, strings, lists or dictionaries "
        "of these."
    )


def _checked_tensor(tensor: Tensor, hook: str, name: str) -> Tensor:
    if tensor.is_complex() or tensor.is_meta:
        found = "a complex tensor" if tensor.is_complex() else "a tensor without values (device 'meta')"
        raise _unwritable(hook, name, found)
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _key(hook: str, name: Any) -> str:
    if not isinstance(name, str):
        raise MetricError(f"Hook {hook!r} returned a metric by the name {name!r}; names of metrics are strings.")
    return f"{hook}/{name}"


def _sub_key(key: Any, hook: str, name: str) -> str | int | float | bool:
    if isinstance(key, str | int | float | bool):
        return key
    raise _unwritable(hook, name, f"a dictionary with {type_name(key)} as a key")


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with numbers in place of tensors: one transfer per device and dtype."""
    if PLAIN.issuperset(map(type, metrics.values())):
        return dict(metrics)
    waiting: list[Tensor] = []
    _visit(metrics.values(), waiting.append)
    if not waiting:
        return dict(metrics)
    values = (tensor.tolist() for tensor in on_host(waiting))
    return {name: value if type(value) in PLAIN else _filled(value, values) for name, value in metrics.items()}


def _visit(values: Iterable[Any], take: Callable[[Tensor], None]) -> None:
    for value in values:
        if type(value) in PLAIN:
            continue
        if isinstance(value, Tensor):
            take(value)
        elif isinstance(value, dict):
            _visit(value.values(), take)
        elif isinstance(value, list):
            _visit(value, take)


def _filled(value: Any, values: Any) -> Any:
    """Return `value` with the next of `values` in place of each tensor, in the order of ``_visit``."""
    if isinstance(value, Tensor):
        return next(values)
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    return value
