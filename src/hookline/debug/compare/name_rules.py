"""Say which sites of two models are the same although they are named, fused or returned in another way.

Users give these to ``compare(rules=)``, beside `DEFAULT_RULES`; `align_runs` applies them to what has no partner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import Tensor

from hookline.debug.compare.run_values import RunValue
from hookline.sites.targets import name_matcher

__all__ = [
    "DEFAULT_RULES",
    "FusedRule",
    "PairRule",
    "RenameRule",
    "Rule",
    "fuse_parts",
    "fused_names",
    "pair_rule_for",
    "rename",
    "sum_of_pair",
]


@dataclass(frozen=True, slots=True)
class FusedRule:
    """One projection in one model, several in the other: ``FusedRule("qkv_proj", ("q_proj", "k_proj", "v_proj"))``.

    The outputs of the parts, one after the other along the last dimension, are the output of the fused one.
    """

    fused: str
    """The last part of the name of the fused module."""
    parts: tuple[str, ...]
    """The last parts of the names of the others, in the order of the fused output."""
    groups: int = 1
    """How many times that order repeats: Megatron's ``linear_qkv`` has queries, key and value of one group of heads
    after the other, ``FusedRule("linear_qkv", ("q_proj", "k_proj", "v_proj"), groups=num_key_value_heads)``."""


@dataclass(frozen=True, slots=True)
class PairRule:
    """Two tensors in one model, one in the other: layers of engines return (hidden, residual), whose sum it is.

    Recipe: ``PairRule("*.layers.#")``; with ``take="first"`` the first of the two is meant.
    """

    sites: str
    """A pattern for names of modules."""
    take: str = "sum"


@dataclass(frozen=True, slots=True)
class RenameRule:
    """Another name for a site: ``RenameRule(r"^decoder\\.", "transformer.")`` renames sites of both models."""

    pattern: str
    """A regular expression."""
    replacement: str


Rule: TypeAlias = FusedRule | PairRule | RenameRule

_QKV: Final = ("q_proj", "k_proj", "v_proj")
DEFAULT_RULES: Final[tuple[Rule, ...]] = (
    FusedRule("qkv_proj", _QKV),
    FusedRule("c_attn", _QKV),
    FusedRule("query_key_value", ("query", "key", "value")),
    FusedRule("gate_up_proj", ("gate_proj", "up_proj")),
    FusedRule("w13", ("w1", "w3")),
    # Norms that add the residual first return (normed, residual) as well: there the first is the output.
    PairRule("*norm*", take="first"),
    PairRule("*ln_*", take="first"),
    PairRule("*.#"),
    PairRule("#"),
)
"""What `compare` applies by default. The first rule that fits is taken, and each is mentioned where it was used."""


def rename(site: str, rules: Sequence[Rule]) -> str:
    """Return the name of a site after all rename rules."""
    for rule in rules:
        if isinstance(rule, RenameRule):
            site = re.sub(rule.pattern, rule.replacement, site)
    return site


def pair_rule_for(site: str, rules: Sequence[Rule]) -> PairRule | None:
    """Return the first pair rule that is about ``site``."""
    return next((rule for rule in rules if isinstance(rule, PairRule) and name_matcher(rule.sites)(site)), None)


def sum_of_pair(values: Mapping[str, RunValue], rule: PairRule) -> RunValue | None:
    """Return one value of the two of a residual pair; None if these are none: two leaves of one shape."""
    if set(values) != {"0", "1"} or values["0"].shape != values["1"].shape:
        return None
    first, second = values["0"], values["1"]
    if rule.take == "first":
        return replace(first, leaf="", note="the first of two")
    note = "sum of hidden and residual"
    return replace(first, leaf="", read=_combined((first, second), _sum), fingerprint=None, note=note)


def fused_names(site: str, rule: FusedRule) -> list[str] | None:
    """Return the names of the parts of a fused site; None if ``site`` is no such."""
    head, dot, last = site.rpartition(".")
    if last != rule.fused:  # a parameter: its own name comes behind that of the module
        owner, _, name = head.rpartition(".")
        if name != rule.fused:
            return None
        return [".".join(filter(None, (owner, part, last))) for part in rule.parts]
    return [f"{head}{dot}{part}" for part in rule.parts]


def fuse_parts(fused: RunValue, parts: Sequence[RunValue], groups: int = 1) -> RunValue:
    """Return what the parts are together, to be compared with ``fused``."""
    names = "+".join(part.site.rpartition(".")[2] for part in parts)
    if fused.kind == "input":
        return replace(parts[0], site=fused.site, note=f"input of {names}")
    along = 0 if fused.kind in ("parameter", "param_grad") else -1
    join: Callable[[list[Tensor]], Tensor] = partial(_cat, along=along, groups=groups)
    if fused.kind == "input_grad":
        shape, join = parts[0].shape, _sum
    else:
        sizes = list(parts[0].shape)
        sizes[along] = sum(part.shape[along] for part in parts)
        shape = tuple(sizes)
    last = max(parts, key=lambda part: part.order)
    return replace(
        last, site=fused.site, shape=shape, read=_combined(parts, join), fingerprint=None, note=f"fused of {names}"
    )


def _combined(values: Sequence[RunValue], join: Callable[[list[Tensor]], Tensor]) -> Callable[[], Tensor] | None:
    readers = [value.read for value in values if value.read is not None]
    return (lambda: join([read() for read in readers])) if len(readers) == len(values) else None


def _cat(tensors: list[Tensor], *, along: int, groups: int) -> Tensor:
    """Return the tensors one after the other, or, of each group of heads, its part of each."""
    if groups == 1:
        return torch.cat(tensors, dim=along)
    of_groups = [torch.stack(tensor.chunk(groups, along), 0 if along == 0 else -2) for tensor in tensors]
    return torch.cat(of_groups, dim=1).flatten(0, 1) if along == 0 else torch.cat(of_groups, dim=-1).flatten(-2)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
