"""Find which value of run A belongs to which of run B, and say what has no partner.

`compare` calls `align`. Values are paired by kind, site and leaf, then by step and call, or by rows where both runs say
whose their rows are; rules pair what is fused or returned in another way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from hookline.debug.compare.match_calls import CallMatcher, LostGradient, UnpairedValue, ValuePair
from hookline.debug.compare.name_rules import (
    FusedRule,
    Rule,
    fuse_parts,
    fused_names,
    pair_rule_for,
    rename,
    sum_of_pair,
)
from hookline.debug.compare.run_values import RunValue, RunValues
from hookline.debug.compare.unshard_values import DimsOption, join_ranks

__all__ = ["Alignment", "align"]

_MAX_NOTES: Final = 3
_FEW: Final = 0.25
"""If less than this part of the values of both runs have a partner, they look like runs of other models."""
_Slot: TypeAlias = tuple[str, str, str]
"""Kind, site, leaf."""
_Slots: TypeAlias = dict[_Slot, list[RunValue]]


@dataclass(slots=True)
class Alignment:
    """What belongs together in two runs."""

    pairs: list[ValuePair] = field(default_factory=list)
    unpaired: list[UnpairedValue] = field(default_factory=list)
    """Values that have a partner, but cannot be compared with it."""
    only_a: list[str] = field(default_factory=list)
    """Sites of A that B does not have."""
    only_b: list[str] = field(default_factory=list)
    lost: list[LostGradient] = field(default_factory=list)
    """Gradients of A that B does not have."""
    sites_left: list[str] = field(default_factory=list)
    """Notes on sites that one run has and the other, which was asked for such values, has not."""
    steps_left: list[str] = field(default_factory=list)
    """Notes on steps that only one run has."""
    calls_left: list[str] = field(default_factory=list)
    """Notes on sites that one run calls more often."""
    few_partners: list[str] = field(default_factory=list)
    """A line if so little is in both that they look like runs of other models."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know about how values were paired."""

    @property
    def missing(self) -> list[str]:
        """Return what only one run has, in words."""
        return [*self.few_partners, *self.sites_left, *self.steps_left, *self.calls_left]


def align(
    a: RunValues,
    b: RunValues,
    *,
    rules: Sequence[Rule],
    dims: DimsOption = None,
    mesh: Mapping[str, int] | None = None,
) -> Alignment:
    """Return what belongs together in runs ``a`` and ``b``."""
    found = Alignment()
    values_a, notes_a = join_ranks(a, dims, mesh)
    values_b, notes_b = join_ranks(b, dims, mesh)
    found.notes += [*notes_a, *notes_b]
    values_a, values_b = _with_common_names(values_a, values_b, rules, found.notes)
    values_a = _with_common_steps(values_a, values_b, found.notes)
    used: set[int] = set()
    for rank_a, rank_b in _rank_pairs(values_a, values_b, found.notes):
        slots_a, slots_b = _slots(values_a, rank_a), _slots(values_b, rank_b)
        _Aligner(slots_a, slots_b, rules, found, used).run()
    lone_a, lone_b = _unused(values_a, used), _unused(values_b, used)
    found.only_a, found.only_b = [*lone_a], [*lone_b]
    for own, lone, other in ((a, lone_a, b), (b, lone_b, a)):
        kinds = other.kinds
        left = [text for text, kind in lone.items() if kind in kinds]
        if left:
            some = f"{', '.join(left[:_MAX_NOTES])}{', …' * (len(left) > _MAX_NOTES)}"
            found.sites_left.append(f"{len(left)} of what {own.name} has is not in {other.name}: {some}.")
    found.lost = _lost_gradients(values_a, used)
    found.pairs.sort(key=lambda pair: pair.b.order)
    if any(pair.keys for pair in found.pairs):
        # Rows lie in other places: what has no rows, such as a mask, has to have another shape.
        found.unpaired = [replace(value, is_difference=False) for value in found.unpaired]
        # And steps of their own: rows of all steps were paired.
        found.steps_left = []
    found.notes += [*found.steps_left, *_shortened(found.calls_left)]
    found.few_partners = _few_partners(values_a, values_b, used)
    return found


def _few_partners(a: Sequence[RunValue], b: Sequence[RunValue], used: set[int]) -> list[str]:
    """Return a line if both runs have mostly values that the other does not have."""
    counts = [sum(id(value) in used for value in values) for values in (a, b)]
    if not all(counts) or any(count >= _FEW * len(values) for count, values in zip(counts, (a, b), strict=True)):
        return []
    return [
        f"only {counts[0]} of {len(a)} values of A, and {counts[1]} of {len(b)} of B, have a partner: they look like "
        "runs of other models. Names can be made equal by rules=[RenameRule(pattern, replacement)]."
    ]


def _shortened(notes: list[str]) -> list[str]:
    """Return the first few notes on sites that were called another number of times."""
    more = len(notes) - _MAX_NOTES
    rest = [f"{more} more sites and steps have another number of calls in A than in B."] if more > 0 else []
    return notes[:_MAX_NOTES] + rest


def _unused(values: Iterable[RunValue], used: set[int]) -> dict[str, str]:
    """Return the sites that have found no partner, in words, with their kinds."""
    touched = {(value.kind, value.site) for value in values if id(value) in used}
    left = (value for value in values if (value.kind, value.site) not in touched)
    return {f"{value.site or '(the model)'} {value.kind}": value.kind for value in left}


def _lost_gradients(values: Sequence[RunValue], used: set[int]) -> list[LostGradient]:
    lost = [value for value in values if value.kind == "output_grad" and id(value) not in used]
    return [LostGradient(one.site, one.step, one.rank, one.order, _taker(one, values)) for one in lost]


def _taker(gradient: RunValue, values: Sequence[RunValue]) -> str:
    """Return the outermost module that is given what the module of ``gradient`` returns; empty if that is not known.

    Only traces tell, by the hash: the tensor is the same.
    """
    here = [
        (one, one.fingerprint.hash)
        for one in values
        if one.fingerprint is not None and one.step == gradient.step and one.rank == gradient.rank
    ]
    source = "output", gradient.site, gradient.call
    made = {hashed for one, hashed in here if (one.kind, one.site, one.call) == source}
    takers = [
        one
        for one, hashed in here
        if one.kind == "input" and hashed in made and not f"{one.site}.".startswith(f"{gradient.site}.")
    ]
    return min(takers, key=lambda one: (one.site.count("."), one.order)).site if takers else ""


def _slots(values: Iterable[RunValue], rank: int) -> _Slots:
    slots: _Slots = defaultdict(list)
    for value in values:
        if value.rank == rank:
            slots[value.kind, value.site, value.leaf].append(value)
    return dict(slots)


class _Aligner:
    """Pairs the values of one rank of A with those of one rank of B."""

    def __init__(
        self, slots_a: _Slots, slots_b: _Slots, rules: Sequence[Rule], found: Alignment, used: set[int]
    ) -> None:
        self.slots = (slots_a, slots_b)
        self.rules = rules
        self.matcher = CallMatcher(found.pairs, found.unpaired, found.steps_left, found.calls_left, used)

    def run(self) -> None:
        """Pair what the rules for residual pairs say, then equal names, then lone leaves, then fused projections."""
        self._pair_residuals()
        for slot in [slot for slot in self.slots[0] if slot in self.slots[1]]:
            self._match(slot, slot)
        self._pair_lone_leaves()
        for rule in self.rules:
            if isinstance(rule, FusedRule):
                self._pair_fused(rule, 0)
                self._pair_fused(rule, 1)

    def _match(self, slot_a: _Slot, slot_b: _Slot) -> None:
        self.matcher.match(self.slots[0].pop(slot_a), self.slots[1].pop(slot_b))

    def _leaves(self, side: int) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for kind, site, leaf in self.slots[side]:
            found[kind, site].append(leaf)
        return found

    def _pair_residuals(self) -> None:
        leaves = self._leaves(0), self._leaves(1)
        for kind, site in leaves[0].keys() & leaves[1].keys():
            for side in (0, 1):
                mine, other = leaves[side][kind, site], leaves[1 - side][kind, site]
                if kind == "output" and set(mine) == {"0", "1"} and len(other) == 1:
                    self._sum_pair(side, site, other[0])

    def _sum_pair(self, side: int, site: str, leaf: str) -> None:
        rule = pair_rule_for(site, self.rules)
        slots = [("output", site, "0"), ("output", site, "1")]
        calls = [{(value.step, value.call): value for value in self.slots[side][slot]} for slot in slots]
        if rule is None or calls[0].keys() != calls[1].keys():
            return
        joined = [sum_of_pair({"0": calls[0][key], "1": calls[1][key]}, rule) for key in calls[0]]
        whole = [value for value in joined if value is not None]
        if len(whole) < len(joined):
            return
        self.matcher.use(value for slot in slots for value in self.slots[side].pop(slot))
        pair = (whole, self.slots[1 - side].pop(("output", site, leaf)))
        self.matcher.match(*(pair if side == 0 else reversed(pair)))

    def _pair_lone_leaves(self) -> None:
        """Pair a tensor with the one item of a tuple or dict: the only one that is left of a site on both sides."""
        leaves = self._leaves(0), self._leaves(1)
        for kind, site in [key for key in leaves[0] if key in leaves[1]]:
            mine, other = leaves[0][kind, site], leaves[1][kind, site]
            if len(mine) == len(other) == 1:
                note = f"{mine[0] or 'the tensor'} of A beside {other[0] or 'the tensor'} of B"
                values_b = self.slots[1].pop((kind, site, other[0]))
                self.matcher.use(values_b)
                self.matcher.match(
                    self.slots[0].pop((kind, site, mine[0])), [replace(value, note=note) for value in values_b]
                )

    def _pair_fused(self, rule: FusedRule, side: int) -> None:
        """Pair fused sites of one side with their parts on the other."""
        whole, parts = self.slots[side], self.slots[1 - side]
        for kind, site, leaf in list(whole):
            names = fused_names(site, rule)
            slots = [(kind, name, leaf) for name in names or ()]
            if not slots or not all(slot in parts for slot in slots):
                continue
            calls = [{(value.step, value.call): value for value in parts[slot]} for slot in slots]
            fused = whole[kind, site, leaf]
            if any(of.keys() != calls[0].keys() for of in calls):
                continue
            joined = [fuse_parts(fused[0], [of[key] for of in calls], rule.groups) for key in calls[0]]
            self.matcher.use(value for slot in slots for value in parts.pop(slot))
            pair: tuple[Any, Any] = whole.pop((kind, site, leaf)), joined
            self.matcher.match(*(pair if side == 0 else reversed(pair)))


# -- names, steps and ranks ------------------------------------------------------------------------------------


def _with_common_names(
    a: list[RunValue], b: list[RunValue], rules: Sequence[Rule], notes: list[str]
) -> tuple[list[RunValue], list[RunValue]]:
    """Return both with their names after the rename rules, and without a prefix that one of them has more."""
    for values in (a, b):
        for value in values:
            value.site = rename(value.site, rules)
    names_a, names_b = {value.site for value in a}, {value.site for value in b}
    if len(names_a & names_b) >= 0.5 * min(len(names_a), len(names_b)):
        return a, b
    for values, own, other, label in ((a, names_a, names_b, "A"), (b, names_b, names_a, "B")):
        prefix = _extra_prefix(own, other)
        if prefix:
            notes.append(f"Names of {label} are compared without their prefix {prefix!r}.")
            for value in values:
                value.site = value.site.removeprefix(prefix)
            break
    return a, b


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


def _with_common_steps(a: list[RunValue], b: list[RunValue], notes: list[str]) -> list[RunValue]:
    """Return A with the numbers of B's steps, where both have as many steps and none in common."""
    steps_a, steps_b = sorted({value.step for value in a}), sorted({value.step for value in b})
    if set(steps_a) & set(steps_b) or len(steps_a) != len(steps_b):
        return a
    notes.append(f"Steps {_range(steps_a)} of A are compared with steps {_range(steps_b)} of B, in this order.")
    mapping = dict(zip(steps_a, steps_b, strict=True))
    for value in a:
        value.step = mapping[value.step]
    return a


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def _rank_pairs(a: Sequence[RunValue], b: Sequence[RunValue], notes: list[str]) -> list[tuple[int, int]]:
    """Return which rank of A is compared with which of B."""
    ranks_a, ranks_b = sorted({value.rank for value in a}), sorted({value.rank for value in b})
    if ranks_a == ranks_b:
        return [(rank, rank) for rank in ranks_a]
    if len(ranks_a) == 1 or len(ranks_b) == 1:
        notes.append(
            f"A has {len(ranks_a)} rank(s), B has {len(ranks_b)}: each is compared with the only one of the other run."
        )
        return [(one, other) for one in ranks_a for other in ranks_b]
    common = [rank for rank in ranks_a if rank in ranks_b]
    notes.append(
        f"A has ranks {ranks_a}, B has {ranks_b}: {common or 'none'} in common are compared. If ranks hold parts, "
        "give dims=."
    )
    return [(rank, rank) for rank in common]
