"""Reduce the metrics of all ranks by the rule that each declares.

The manager calls it with what its hooks returned; it packs numbers for one `Exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from hookline.distributed.agreement import NamedPart
from hookline.distributed.exchange import Exchange, Reduced
from hookline.distributed.ranks import gather_objects, is_distributed
from hookline.errors import OptionError
from hookline.messages import suggest, type_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RULES", "check_rule", "reduce_metrics"]

RULES: Final = ("mean", "sum", "max", "min", "l2", "concat", "none")
_ADDED: Final = ("mean", "sum", "l2")
_KEPT: Final = ("max", "min")


def check_rule(rule: str) -> str:
    """Return ``rule`` if it is one of `RULES`; raise `OptionError` if not."""
    if rule not in RULES:
        known = ", ".join(map(repr, RULES))
        raise OptionError(f"Unknown reduction {rule!r}{suggest(rule, RULES) or '.'} There are {known}.")
    return rule


def reduce_metrics(
    exchange: Exchange, metrics: Mapping[str, Any], rules: Mapping[str, str], failure: str | None = None
) -> dict[str, Any]:
    """Return the metrics of all ranks as one dictionary, the same on every rank but for those of rule ``none``.

    Recipe: ``reduce_metrics(exchange, {"loss": 0.3, "tokens": 512}, {"loss": "mean", "tokens": "sum"})``.
    All ranks have to call it with the same ``exchange``. It takes two collectives, and one more where a rule is
    ``concat``. A metric that only some ranks have is reduced over these, and every rank receives it.

    Args:
        exchange: Where ranks agree on names.
        metrics: The metrics of this rank: numbers, or arrays and tensors of numbers.
        rules: For each name ``mean`` (each rank counts the same), ``sum``, ``max``, ``min``, ``l2`` (root of the sum of
            squares), ``concat`` (a list with the value of each rank that has it) or ``none``, which leaves this rank's
            value as it is, as do names that are absent here.
        failure: What a hook raised on this rank, if one did. Every rank then raises `RankError`.
    """
    chosen = {name: check_rule(rules.get(name, "none")) for name in metrics}
    numbers, problem = _numbers(metrics, chosen)
    parts = [_part(chosen[name], name, numbers.get(name)) for name in metrics if chosen[name] != "none"]
    added = [_added(chosen[name], each) for name, each in numbers.items() if chosen[name] in _ADDED]
    kept = [each if chosen[name] == "max" else -each for name, each in numbers.items() if chosen[name] in _KEPT]
    reduced = exchange.reduce(parts, _joined(added), _joined(kept), failure=failure or problem)
    lists = _concatenated(metrics, chosen, reduced, exchange.what)
    found = {name: value for name, value in metrics.items() if chosen[name] == "none"}
    for key in reduced.agreed.holdings:
        rule, _, name = key.partition(":")
        if rule == "concat":
            found[name] = lists[name]
        else:
            found[name] = _shaped(_value(rule, key, reduced), metrics.get(name))
    return {name: found[name] for name in dict.fromkeys((*metrics, *found))}


def _numbers(metrics: Mapping[str, Any], chosen: dict[str, str]) -> tuple[dict[str, NDArray[np.float64]], str | None]:
    """Return the numbers of each metric that is to be reduced; and a sentence if one has none."""
    found: dict[str, NDArray[np.float64]] = {}
    problem = None
    for name, value in metrics.items():
        if chosen[name] not in (*_ADDED, *_KEPT):
            continue
        try:
            host = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else value
            found[name] = np.asarray(host, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError):
            found[name] = np.zeros(1)
            problem = f"metric {name!r} is {type_name(value)}, which has no {chosen[name]}; declare 'concat' or 'none'"
    return found, problem


def _part(rule: str, name: str, numbers: NDArray[np.float64] | None) -> NamedPart:
    size = 0 if numbers is None else numbers.size
    if rule == "mean":
        return NamedPart(f"{rule}:{name}", size + 1, 0)
    return NamedPart(f"{rule}:{name}", size if rule in _ADDED else 0, size if rule in _KEPT else 0)


def _added(rule: str, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what is added up: numbers and their weight, numbers, or squares."""
    if rule == "mean":
        return np.append(numbers, 1.0)
    return numbers * numbers if rule == "l2" else numbers


def _value(rule: str, key: str, reduced: Reduced) -> NDArray[np.float64]:
    held = reduced.agreed.holdings[key]
    added, kept = reduced.added[held.added], reduced.kept[held.kept]
    if rule in _KEPT:
        return kept if rule == "max" else -kept
    found: NDArray[np.float64] = (
        added[:-1] / added[-1] if rule == "mean" else added if rule == "sum" else np.sqrt(added)
    )
    return found


def _shaped(numbers: NDArray[np.float64], like: Any) -> Any:
    """Return ``numbers`` in the form of ``like``: a number, or an array of that shape; whole where it was whole."""
    if like is None or isinstance(like, int | float | np.number | np.bool_):
        if numbers.size != 1:
            return numbers
        value = float(numbers[0])
        is_whole = isinstance(like, int | np.integer) and math.isfinite(value) and value.is_integer()
        return int(value) if is_whole else value
    shape = np.shape(like)
    return numbers.reshape(shape) if shape else float(numbers[0])


def _concatenated(metrics: Mapping[str, Any], chosen: dict[str, str], reduced: Reduced, what: str) -> dict[str, Any]:
    """Return the values of each rank for the metrics of rule ``concat``; no collective if no rank has one."""
    names = [key.removeprefix("concat:") for key in reduced.agreed.holdings if key.startswith("concat:")]
    if not names:
        return {}
    own = {name: metrics[name] for name in names if chosen.get(name) == "concat"}
    said = gather_objects(own, what=f"{what}, concatenation") if is_distributed() else [own]
    return {name: [each[name] for each in said if name in each] for name in names}


def _joined(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(parts) if parts else np.zeros(0)
