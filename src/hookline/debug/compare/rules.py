"""Pair the values of two runs: names, steps, ranks and fused or summed tensors are made equal, then keys are.

`compare` calls `pair_runs`; users give `FusedRule`, `PairRule` and `RenameRule` to ``compare(rules=)``. Each rule is a
function from the values of two runs to values with other keys; after the last, equal keys are pairs.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import Tensor

from hookline.debug.compare.key import PARAMETERS, WRONG, Pair, Value, ValueKey, Values
from hookline.debug.compare.rows import by_rows
from hookline.debug.compare.values import Run, by_key
from hookline.sites.targets import name_matcher
from hookline.tables import THE_MODEL

_MAX_NOTES: Final = 3
_FEW: Final = 0.25
"""If less than this part of the values of both runs have a partner, they look like runs of other models."""


@dataclass(frozen=True, slots=True)
class FusedRule:
    """One projection in one model, several in the other: ``FusedRule("qkv_proj", ("q_proj", "k_proj", "v_proj"))``.

    The outputs of the parts, one after the other along the last dimension, are the output of the fused one.
    """

    fused: str
    """The last part of the name of the fused module."""
    parts: tuple[str, ...]
    """The last parts of the names of the others, in the order of the fused output."""


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


_Two: TypeAlias = tuple[Values, Values]


def pair_runs(a: Run, b: Run, rules: Sequence[Rule], notes: list[str]) -> list[Pair]:
    """Return a pair for each place of both runs, in the order of A; add to ``notes`` what was done to keys."""
    two: _Two = a.values, b.values
    two = _rename(*two, rules, notes)
    two = _with_steps_of(*two, notes), two[1]
    two = _match_ranks(*two, notes)
    two = _sum_residuals(*two, rules), _sum_residuals(two[1], two[0], rules)
    two = two[0], _with_leaves_of(*two)
    two = _fuse(*two, rules), _fuse(two[1], two[0], rules)
    has_rows = all(any(value.rows is not None for value in one.values()) for one in two)
    values_a, values_b, moved = by_rows(*two) if has_rows else (*two, {})
    pairs = [_pair(key, values_a.get(key), values_b.get(key), moved) for key in {**values_a, **values_b}]
    if any(pair.is_by_rows for pair in pairs):
        # Rows lie in other places: what has no rows, such as a mask, has to have another shape; or it holds the tokens
        # of an expert in the order of the batch, so that nobody knows which belong together.
        for pair in pairs:
            pair.is_same = pair.is_same or bool(pair.why)
            pair.is_sure = (
                pair.is_by_rows or pair.kind in PARAMETERS or (pair.a is not None and pair.a.rows is not None)
            )
    return sorted(pairs, key=lambda pair: pair.order)


def _pair(key: ValueKey, a: Value | None, b: Value | None, moved: dict[ValueKey, str]) -> Pair:
    pair = Pair(key, a, b, is_by_rows=moved.get(key) == "")
    if a is not None and b is not None:
        pair.how = "; ".join(dict.fromkeys(filter(None, (a.note, b.note))))
        other = "" if a.shape == b.shape else f"its shape is {a.shape} in A and {b.shape} in B{_advice(a, b)}"
        pair.why = moved.get(key) or other
        pair.is_same, pair.verdict = not pair.why, WRONG if pair.why else pair.verdict
    return pair


def _advice(a: Value, b: Value) -> str:
    if math.prod(a.shape) == math.prod(b.shape):
        return ", though both have as many numbers: if rows lie in other places, give rows="
    if len(a.shape) == len(b.shape):
        return "; if ranks hold parts of it give dims=, if the runs have other rows give rows="
    return ""


# -- what only one run has -----------------------------------------------------------------------------------------


def find_gaps(pairs: Sequence[Pair], a: Run, b: Run) -> list[str]:
    """Return lines on sites, steps and calls that only one run has; kinds that it was not asked for are no gap.

    Pairs of calls of which nobody knows that they belong together are marked.
    """
    by_slot: dict[ValueKey, dict[int, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        by_slot[pair.key.slot][pair.step].append(pair)
    lines: dict[str, None] = {}
    are_rows_paired = any(pair.is_by_rows for pair in pairs)  # of all steps
    for slot, by_step in by_slot.items():
        counts = {
            step: (sum(one.a is not None for one in found), sum(one.b is not None for one in found))
            for step, found in by_step.items()
        }
        if not all(map(any, zip(*counts.values(), strict=True))):
            continue  # a site of one run alone
        left = sorted(step for step, count in counts.items() if not all(count))
        if left and not are_rows_paired:
            have = "A" if counts[left[0]][0] else "B"
            lines[f"Only some steps: {left[:6]} are only in {have} for some sites; the others are compared."] = None
        for step, (in_a, in_b) in counts.items():
            if step not in left and any(one.a is None or one.b is None for one in by_step[step]):
                lines[
                    f"{slot.site or THE_MODEL} ({slot.kind}) was called {in_a} time(s) in step {step} of A and "
                    f"{in_b} in B; they are compared in order, and are not blamed."
                ] = None
                for pair in by_step[step]:
                    pair.is_sure = False
    return [*_sites_left(pairs, a, b), *lines]


def few_partners(pairs: Sequence[Pair]) -> list[str]:
    """Return a line if both runs have mostly values that the other does not have: they are of other models."""
    both = sum(pair.a is not None and pair.b is not None for pair in pairs)
    in_a, in_b = sum(pair.a is not None for pair in pairs), sum(pair.b is not None for pair in pairs)
    if not both or both >= _FEW * min(in_a, in_b):
        return []
    return [
        f"only {both} of {in_a} values of A, and {both} of {in_b} of B, have a partner: they look like "
        "runs of other models. Names can be made equal by rules=[RenameRule(pattern, replacement)]."
    ]


def _sites_left(pairs: Sequence[Pair], a: Run, b: Run) -> list[str]:
    lines = []
    for own, other, lone in ((a, b, only_in(pairs, "A")), (b, a, only_in(pairs, "B"))):
        kinds = other.kinds
        left = [text for text, kind in lone.items() if kind in kinds]
        if left:
            some = f"{', '.join(left[:_MAX_NOTES])}{', …' * (len(left) > _MAX_NOTES)}"
            lines.append(f"{len(left)} of what {own.name} has is not in {other.name}: {some}.")
    return lines


def only_in(pairs: Sequence[Pair], side: str) -> dict[str, str]:
    """Return the sites that only run ``side`` has, in words, with their kinds."""
    both = {(pair.kind, pair.site) for pair in pairs if pair.a is not None and pair.b is not None}
    lone = (pair for pair in pairs if (pair.b if side == "A" else pair.a) is None)
    return {f"{one.site or THE_MODEL} {one.kind}": one.kind for one in lone if (one.kind, one.site) not in both}


# -- names, steps and ranks ----------------------------------------------------------------------------------------


def _rename(a: Values, b: Values, rules: Sequence[Rule], notes: list[str]) -> _Two:
    """Return both with their names after the rename rules, and without a prefix that one of them has more."""
    a, b = (
        by_key((key._replace(site=_renamed(key.site, rules)), value) for key, value in one.items()) for one in (a, b)
    )
    names_a, names_b = {key.site for key in a}, {key.site for key in b}
    if len(names_a & names_b) >= 0.5 * min(len(names_a), len(names_b)):
        return a, b
    prefix = _extra_prefix(names_a, names_b)
    label, prefix = ("A", prefix) if prefix else ("B", _extra_prefix(names_b, names_a))
    if prefix:
        notes.append(f"Names of {label} are compared without their prefix {prefix!r}.")
        shorter = {
            key._replace(site=key.site.removeprefix(prefix)): value for key, value in (a if label == "A" else b).items()
        }
        return (shorter, b) if label == "A" else (a, shorter)
    return a, b


def _renamed(site: str, rules: Sequence[Rule]) -> str:
    for rule in rules:
        if isinstance(rule, RenameRule):
            site = re.sub(rule.pattern, rule.replacement, site)
    return site


def _extra_prefix(own: set[str], other: set[str]) -> str:
    """Return the prefix without which most of ``own`` are names of ``other``; nothing if there is none."""
    counts: dict[str, int] = defaultdict(int)
    for name in own:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            if ".".join(parts[depth:]) in other:
                counts[".".join(parts[:depth]) + "."] += 1
    best = max(counts, key=lambda prefix: counts[prefix], default="")
    # One name in common says nothing: every model has a "norm".
    return best if counts.get(best, 0) > max(2, len(own & other)) else ""


def _with_steps_of(a: Values, b: Values, notes: list[str]) -> Values:
    """Return A with the numbers of B's steps, where both have as many steps and none in common."""
    steps_a, steps_b = sorted({key.step for key in a}), sorted({key.step for key in b})
    if set(steps_a) & set(steps_b) or len(steps_a) != len(steps_b):
        return a
    notes.append(f"Steps {_range(steps_a)} of A are compared with steps {_range(steps_b)} of B, in this order.")
    mapping = dict(zip(steps_a, steps_b, strict=True))
    return {key._replace(step=mapping[key.step]): value for key, value in a.items()}


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def _match_ranks(a: Values, b: Values, notes: list[str]) -> _Two:
    """Return both with the same ranks: those that both have, or the only one of one run beside each of the other."""
    ranks_a, ranks_b = sorted({key.rank for key in a}), sorted({key.rank for key in b})
    if ranks_a == ranks_b:
        return a, b
    if len(ranks_a) == 1 or len(ranks_b) == 1:
        notes.append(
            f"A has {len(ranks_a)} rank(s), B has {len(ranks_b)}: each is compared with the only one of the other run."
        )
        return (_on_ranks(a, ranks_b), b) if len(ranks_a) == 1 else (a, _on_ranks(b, ranks_a))
    common = [rank for rank in ranks_a if rank in ranks_b]
    notes.append(
        f"A has ranks {ranks_a}, B has {ranks_b}: {common or 'none'} in common are compared. If ranks hold parts, "
        "give dims=."
    )
    a, b = ({key: value for key, value in one.items() if key.rank in common} for one in (a, b))
    return a, b


def _on_ranks(values: Values, ranks: Iterable[int]) -> Values:
    return {key._replace(rank=rank): value for rank in ranks for key, value in values.items()}


# -- values that are returned in another way -----------------------------------------------------------------------


def _keys_by_slot(values: Values) -> dict[ValueKey, list[ValueKey]]:
    found: dict[ValueKey, list[ValueKey]] = defaultdict(list)
    for key in values:
        found[key.slot].append(key)
    return found


def _leaves_by_site(slots: Iterable[ValueKey]) -> dict[ValueKey, list[str]]:
    found: dict[ValueKey, list[str]] = defaultdict(list)
    for slot in slots:
        found[slot._replace(leaf="")].append(slot.leaf)
    return found


def _sum_residuals(own: Values, other: Values, rules: Sequence[Rule]) -> Values:
    """Return ``own`` with one value for the two of a residual pair, where ``other`` has one."""
    others = _leaves_by_site({key.slot: None for key in other})
    found = dict(own)
    for first in [key for key in own if key.kind == "output" and key.leaf == "0"]:
        second, leaves = first._replace(leaf="1"), others.get(first.slot._replace(leaf=""), [])
        is_pair = second in own and first._replace(leaf="2") not in own and own[first].shape == own[second].shape
        rule = _pair_rule_for(first.site, rules) if is_pair and len(leaves) == 1 else None
        if rule is not None:
            both = found.pop(first), found.pop(second)
            found[first._replace(leaf=leaves[0])] = _sum_of_pair(*both, rule)
    return found


def _pair_rule_for(site: str, rules: Sequence[Rule]) -> PairRule | None:
    return next((rule for rule in rules if isinstance(rule, PairRule) and name_matcher(rule.sites)(site)), None)


def _sum_of_pair(first: Value, second: Value, rule: PairRule) -> Value:
    if rule.take == "first":
        return replace(first, note="the first of two")
    note = "sum of hidden and residual"
    return replace(first, read=_combined((first, second), _sum), fingerprint=None, note=note)


def _with_leaves_of(a: Values, b: Values) -> Values:
    """Return B with a leaf named as in A, where it is the only one of a site that is left on both sides."""
    slots_a, slots_b = _keys_by_slot(a), _keys_by_slot(b)
    left_a = _leaves_by_site(slot for slot in slots_a if slot not in slots_b)
    left_b = _leaves_by_site(slot for slot in slots_b if slot not in slots_a)
    found = dict(b)
    for site, leaves in left_a.items():
        others = left_b.get(site, [])
        if len(leaves) == len(others) == 1:
            note = f"{leaves[0] or 'the tensor'} of A beside {others[0] or 'the tensor'} of B"
            for key in slots_b[site._replace(leaf=others[0])]:
                found[key._replace(leaf=leaves[0])] = replace(found.pop(key), note=note)
    return found


def _fuse(own: Values, other: Values, rules: Sequence[Rule]) -> Values:
    """Return ``own`` with one value for the parts of what is fused in ``other``."""
    found = dict(own)
    slots, others = {key.slot for key in own}, {key.slot for key in other}
    for rule in (rule for rule in rules if isinstance(rule, FusedRule)):
        for key in list(found):
            whole, *parts = (_with_name(key, rule.parts[0], name) for name in (rule.fused, *rule.parts))
            is_fused = whole != key and whole.slot in others and whole.slot not in slots
            if is_fused and all(part in found and part.slot not in others for part in parts):
                found[whole] = _fuse_parts(key.kind, [found.pop(part) for part in parts], "+".join(rule.parts))
    return found


def _with_name(key: ValueKey, old: str, new: str) -> ValueKey:
    """Return the key with ``new`` for the last name of its module, if that is ``old``."""
    parts = key.site.split(".")
    last = -2 if key.kind in PARAMETERS and len(parts) > 1 else -1
    parts[last] = new if parts[last] == old else parts[last]
    return key._replace(site=".".join(parts))


def _fuse_parts(kind: str, parts: Sequence[Value], names: str) -> Value:
    """Return what the parts are together."""
    if kind == "input":
        return replace(parts[0], note=f"input of {names}")
    along = 0 if kind in PARAMETERS else -1
    join: Callable[[list[Tensor]], Tensor] = partial(torch.cat, dim=along)
    if kind == "input_grad":
        shape, join = parts[0].shape, _sum
    else:
        sizes = list(parts[0].shape)
        sizes[along] = sum(part.shape[along] for part in parts)
        shape = tuple(sizes)
    last = max(parts, key=lambda part: part.order)
    return replace(last, shape=shape, read=_combined(parts, join), fingerprint=None, note=f"fused of {names}")


def _combined(values: Sequence[Value], join: Callable[[list[Tensor]], Tensor]) -> Callable[[], Tensor] | None:
    is_there = all(value.read is not None for value in values)
    return (lambda: join([value.tensor() for value in values])) if is_there else None


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
