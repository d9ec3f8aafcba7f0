"""Find the module in which two runs part, or what outside of the model is to blame, and say why in a sentence.

`compare` calls `find_blame` with the verdicts of `compare_pairs` and with what `align_runs` could not pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hookline.debug.compare.compared_value import Blame, ComparedValue
from hookline.debug.compare.judge_errors import BACKWARD
from hookline.debug.compare.match_calls import LostGradient, UnpairedValue
from hookline.debug.compare.rounding import WRONG
from hookline.debug.compare.tensor_errors import TensorErrors

__all__ = ["find_blame"]

_INPUTS: Final = "the inputs"
_LOSS: Final = "the loss"
_OPTIMIZER: Final = "the optimizer"
_BEFORE_STEP: Final = "the code between backward and step"


def find_blame(
    values: Sequence[ComparedValue], unpaired: Sequence[UnpairedValue] = (), lost: Sequence[LostGradient] = ()
) -> list[Blame]:
    """Return the modules in which the runs part, and mark what follows from them.

    That is mostly one: whatever differs later follows from the first. Blamed by themselves are parameters that differ
    from the beginning, and modules that were given the same to the bit in the step of the first.

    Args:
        values: What was compared, in the order of the calls.
        unpaired: What could not be compared; another shape is a difference like any other.
        lost: Gradients of A that B does not have.
    """
    return _BlameFinder(values, unpaired, lost).find()


class _BlameFinder:
    """Looks at all values of a comparison."""

    def __init__(
        self, values: Sequence[ComparedValue], unpaired: Sequence[UnpairedValue], lost: Sequence[LostGradient]
    ) -> None:
        self.values, self.lost = values, lost
        self.start = min((value.step for value in values), default=0)
        self.seen = {value.site for value in values if value.kind in ("output", "input_grad")}
        """Modules that are called."""
        self.not_given = {(one.site, one.step, one.call) for one in unpaired if one.kind == "input"}
        """Calls with an input that could not be compared."""
        self.unpaired = [one for one in unpaired if one.is_difference and one.is_other_shape]

    def find(self) -> list[Blame]:
        """Return what is to blame, the first first."""
        differing = [value for value in self.values if not value.is_same and value.is_sure and not value.is_unsure]
        roots = [value for value in differing if value.kind == "parameter" and value.step == self.start]
        computed = [value for value in differing if value.kind != "parameter" or value.step != self.start]
        shape = self._first_other_shape()
        if shape is not None and (not computed or shape.order < computed[0].order):
            computed = [shape, *computed]
        if not roots:
            roots = computed[:1]
        if not roots:
            return []
        outside = self._outside(roots[0], computed)
        if outside is not None:
            return self._marked([outside], differing)
        known = {root.module for root in roots}
        for value in self._given_the_same(computed):
            if value.module not in known:
                known.add(value.module)
                roots.append(value)
        found = [self._blame(root) for root in roots]
        return self._marked(list({blame.module: blame for blame in reversed(found)}.values())[::-1], differing)

    @staticmethod
    def _marked(blamed: list[Blame], differing: Sequence[ComparedValue]) -> list[Blame]:
        """Note on all that differs what it follows from."""
        own = {blame.module for blame in blamed}
        chosen = {id(blame.value) for blame in blamed}
        for value in differing:
            if id(value) not in chosen:
                first = blamed[0].outside or blamed[0].module or "(the model)"
                value.follows = value.module if value.module and value.module in own else first
        return blamed

    # -- what is first -----------------------------------------------------------------------------------------

    def _first_other_shape(self) -> ComparedValue | None:
        """Return the first value that has another shape, if something before it is the same; None if there is none.

        Where the very first value has another shape, the runs have other batches, and no module is to blame.
        """
        if not self.unpaired:
            return None
        one = min(self.unpaired, key=lambda each: each.order)
        if not any(value.is_same and value.step == one.step and value.order < one.order for value in self.values):
            return None
        return ComparedValue(
            one.site, one.kind, one.leaf, one.step, one.call, one.rank, one.order, (), "", "", TensorErrors(0),
            verdict=WRONG, is_same=False, other_shape=one.why,
        )  # fmt: skip

    def _given_the_same(self, computed: Sequence[ComparedValue]) -> list[ComparedValue]:
        """Return the outputs that differ though all that their module was given is the same to the bit.

        Only those in the step and on the rank of the first difference: later a cache, and another rank, bring it along.
        A module with something in it that differs passes that on.
        """
        if not computed:
            return []
        step, rank = computed[0].step, computed[0].rank
        forward = [value for value in computed if value.kind in ("input", "output")]
        inside = {name for value in forward if (value.step, value.rank) == (step, rank) for name in _around(value)}
        given: dict[tuple[Any, ...], bool] = {}
        for value in self.values:
            if value.kind == "input":
                key = value.site, value.step, value.call, value.rank
                given[key] = given.get(key, True) and value.errors.is_equal
        return [
            value for value in forward
            if value.kind == "output" and (value.step, value.rank) == (step, rank) and value.site not in inside
            and given.get((value.site, value.step, value.call, value.rank), False)
            and (value.site, value.step, value.call) not in self.not_given
        ]  # fmt: skip

    # -- the code outside of the model -------------------------------------------------------------------------

    def _outside(self, first: ComparedValue, computed: Sequence[ComparedValue]) -> Blame | None:
        """Return what is to blame if it is no module: inputs, the loss, what is done to gradients, the optimizer."""
        if first.kind == "input" and not first.site:
            what = "inputs of another shape" if first.other_shape else "other inputs"
            return Blame("", f"The model was given {what}.", first, outside=_INPUTS)
        if first.kind == "output_grad" and not self._outermost(first):
            text = "All that the model returns is the same, and another gradient comes back to it."
            return Blame("", text, first, outside=_LOSS)
        if first.kind == "param_grad":
            return self._blame_gradients(first, computed)
        is_later = first.step > self.start
        if is_later and first.kind == "parameter":
            return self._blame_updates(first, computed)
        if is_later and first.kind == "output":
            changed = [value.module for value in self._given_the_same(computed) if self._had_equal_gradients(value)]
            if len(set(changed)) > 1:
                return self._blame_optimizer(first, f"{len(set(changed))} modules are given the same to the bit and "
                                             f"return something else from step {first.step} on")  # fmt: skip
        return None

    def _blame_gradients(self, first: ComparedValue, computed: Sequence[ComparedValue]) -> Blame | None:
        """Blame the code behind the backward if gradients of many modules differ, and those that arrive do not."""
        modules = {value.module for value in computed if value.kind == "param_grad" and value.step == first.step}
        count = sum(value.kind == "param_grad" and value.step == first.step for value in computed)
        arrive = [value for value in self.values if value.kind == "output_grad" and value.step == first.step]
        if len(modules) < 2 or not all(value.is_same for value in arrive):
            return None
        if not arrive:
            text = (
                f"The gradients of {count} parameters differ, and those that arrive at the modules were not compared: "
                "with output_grad in both traces, the backward could be told from what is done to gradients after it."
            )
            return Blame("", text, first, outside="the backward, or the code between it and step")
        text = (
            f"The gradients of {count} parameters differ, though those that arrive at the modules are the same: "
            "they are changed afterwards (clipping, scaling), or added to others (accumulation, zero_grad)."
        )
        return Blame("", text, first, outside=_BEFORE_STEP)

    def _blame_updates(self, first: ComparedValue, computed: Sequence[ComparedValue]) -> Blame | None:
        modules = {value.module for value in computed if value.kind == "parameter" and value.step == first.step}
        if len(modules) < 2:
            return None
        return self._blame_optimizer(
            first, f"The parameters of {len(modules)} modules differ from step {first.step} on"
        )

    def _blame_optimizer(self, first: ComparedValue, what: str) -> Blame:
        text = f"{what}, and not before; their gradients are the same: they were updated in another way."
        return Blame("", text, first, outside=_OPTIMIZER)

    def _had_equal_gradients(self, value: ComparedValue) -> bool:
        """Return whether gradients of the module's own parameters were compared in steps before, and are the same."""
        of_module = [each for each in self.values if each.kind == "param_grad" and each.module == value.site]
        before = [each for each in of_module if each.step < value.step]
        return bool(before) and all(each.is_same for each in before)

    # -- modules -----------------------------------------------------------------------------------------------

    def _blame(self, first: ComparedValue) -> Blame:
        """Return the module that made ``first``, of what else of it was traced."""
        if first.kind in ("parameter", "param_grad"):
            what = "holds another parameter" if first.kind == "parameter" else "gets another gradient"
            return Blame(first.module, f"{first.module or 'The model'} {what}: {first.site}.", first)
        lost = self._lost_before(first)
        if lost is not None:
            taker = lost.taker or _caller(lost.site, self.seen)
            text = f"No gradient of {taker or 'the model'} reaches {lost.site} in B; in A one does."
            return Blame(taker, text, first)
        if first.kind in ("input", "output_grad"):
            return self._blame_caller(first)
        return self._blame_module(first)

    def _blame_module(self, first: ComparedValue) -> Blame:
        takes = "input" if first.kind == "output" else "output_grad"
        inner = any(site.startswith(f"{first.site}.") for site in self.seen) if first.site else len(self.seen) > 1
        name = first.site or "The model"
        if inner:
            text = f"All that the modules inside of {name} make is the same; its own code differs."
            return Blame(first.site, text, first)
        given = [value for value in self.values if value.site == first.site and value.kind == takes]
        now = [value for value in given if (value.step, value.call) == (first.step, first.call)]
        is_known = (first.site, first.step, first.call) not in self.not_given and not any(one.is_unsure for one in now)
        other = "something of another shape" if first.other_shape else "something else"
        if given and is_known:
            here = [value.errors for value in now]
            how = "to the bit" if here and all(errors.is_equal for errors in here) else "up to rounding"
            what = f"is given the same {how} and returns {other}"
            if first.kind == "output" and first.step > self.start and self._had_equal_gradients(first):
                what += "; its gradients that were compared are the same: were its weights updated in another way?"
            text = f"{name} {what if first.kind == 'output' else 'hands on another gradient'}."
            return Blame(first.site, text, first)
        caller = _caller(first.site, self.seen)
        text = (
            "What it was given was not compared: with inputs in both traces, the code of "
            f"{caller or 'the model'} around it could be told apart."
        )
        if now:
            text = f"Not all that it was given is known to be the same: {caller or 'the model'} may be what is wrong."
        text = f"{name} is the first that returns {other}. {text}"
        return Blame(first.site, text, first)

    def _blame_caller(self, first: ComparedValue) -> Blame:
        """Blame the module whose own code made an input, or a gradient of an output."""
        site = self._outermost(first) if first.kind == "output_grad" else first.site
        caller = _caller(site, self.seen)
        what = "hands other values to" if first.kind == "input" else "gives another gradient to"
        if first.other_shape:
            what = "hands a tensor of another shape to"
        text = f"The code of {caller or 'the model'} {what} {site}; all that was compared before it is the same."
        return Blame(caller, text, first)

    def _outermost(self, first: ComparedValue) -> str:
        """Return the outermost module whose output has this gradient: the module around it may return the same tensor.

        That is seen by equal numbers, and is empty for the model itself.
        """
        site = first.site
        while site:
            around = _caller(site, self.seen)
            alike = any(
                (value.site, value.kind, value.step, value.rank) == (around, "output_grad", first.step, first.rank)
                and value.shape == first.shape and value.errors == first.errors
                for value in self.values
            )  # fmt: skip
            if not alike:
                return site
            site = around
        return site

    def _lost_before(self, first: ComparedValue) -> LostGradient | None:
        """Return the first gradient that B does not have, if A has it before ``first``, which is of the backward."""
        if first.kind not in BACKWARD:
            return None
        before = [
            one for one in self.lost
            if (one.step, one.rank) == (first.step, first.rank) and one.order < first.order and one.site in self.seen
        ]  # fmt: skip
        return min(before, key=lambda one: one.order, default=None)


def _around(value: ComparedValue) -> list[str]:
    """Return the names of the modules around the one of a value; the model's is empty."""
    if not value.site:
        return []
    parts = value.site.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def _caller(site: str, seen: set[str]) -> str:
    """Return the nearest module around ``site`` that is called: a list of modules is not."""
    while site:
        site = site.rpartition(".")[0]
        if site in seen:
            return site
    return ""
