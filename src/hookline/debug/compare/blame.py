"""Find the module in which two runs part, or what outside of the model is to blame, and say why in a sentence.

`compare` calls `find_blame` with the pairs that `judge` has judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hookline.debug.compare.key import Pair, ValueKey, names_around
from hookline.tables import THE_MODEL

_INPUTS: Final = "the inputs"
_LOSS: Final = "the loss"
_OPTIMIZER: Final = "the optimizer"
_BEFORE_STEP: Final = "the code between backward and step"


@dataclass(frozen=True, slots=True)
class Blame:
    """The module in which two runs part."""

    module: str
    """Its name; empty for the model itself."""
    why: str
    """What was seen, in a sentence."""
    value: Pair
    """The first value that differs."""
    outside: str = ""
    """What is to blame if it is no module: ``"the inputs"``, ``"the loss"``, ``"the optimizer"``, …"""

    @property
    def is_input(self) -> bool:
        """Whether the runs were given other inputs."""
        return self.outside == _INPUTS

    @property
    def name(self) -> str:
        """What is to blame, in words."""
        return self.outside or self.module or "the model"


def find_blame(pairs: Sequence[Pair]) -> list[Blame]:
    """Return the modules in which the runs part, and mark what follows from them.

    That is mostly one: whatever differs later follows from the first. Blamed by themselves are parameters that differ
    from the beginning, and modules that were given the same to the bit in the step of the first.

    Args:
        pairs: All of two runs, in the order of A; those that only A has tell of gradients that are lost in B.
    """
    return _BlameFinder(pairs).find()


class _BlameFinder:
    """Looks at all pairs of a comparison."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        self.values = [pair for pair in pairs if pair.is_measured]
        self.start = min((value.step for value in self.values), default=0)
        self.seen = {value.site for value in self.values if value.kind in ("output", "input_grad")}
        """Modules that are called."""
        self.not_given = {pair.key.of_call for pair in pairs if pair.why and pair.kind == "input"}
        """Calls with an input that could not be compared."""
        self.differing = [one for one in self.values if not one.is_same and one.is_sure and not one.is_unsure]
        self.held = [one for one in self.differing if one.kind == "parameter" and one.step == self.start]
        """Parameters that differ from the beginning."""
        self.computed = [one for one in self.differing if one.kind != "parameter" or one.step != self.start]
        """What else differs; another shape is a difference as well."""
        shape = self._first_other_shape()
        if shape is not None and (not self.computed or shape.order < self.computed[0].order):
            self.computed.insert(0, shape)

    def find(self) -> list[Blame]:
        """Return what is to blame, the first first."""
        if self.held:
            blamed = [self._holder(one) for one in self.held]
        elif self.computed:
            first = self.computed[0]
            # Who has made the first difference, by what it is of.
            makers = {
                "input": self._caller_of, "output": self._module_or_optimizer, "output_grad": self._loss_or_caller,
                "input_grad": self._module_or_lost, "param_grad": self._gradients,
                "parameter": self._holder_or_optimizer,
            }  # fmt: skip
            blamed = [makers[first.kind](first)]
        else:
            return []
        if not blamed[0].outside:
            known = {blame.value.module for blame in blamed}
            blamed += [self._module(one) for one in self._given_the_same() if one.module not in known]
            blamed = list({one.module: one for one in reversed(blamed)}.values())[::-1]
        self._mark_followers(blamed)
        return blamed

    def _mark_followers(self, blamed: Sequence[Blame]) -> None:
        """Note on all that differs what it follows from."""
        own = {blame.module for blame in blamed if blame.module}
        chosen = {id(blame.value) for blame in blamed}
        first = blamed[0].outside or blamed[0].module or THE_MODEL
        for value in self.differing:
            if id(value) not in chosen:
                value.follows = value.module if value.module in own else first

    # -- what is first -----------------------------------------------------------------------------------------

    def _first_other_shape(self) -> Pair | None:
        """Return the first pair of two shapes, if something before it is the same; None if there is none.

        Where the very first value has another shape, the runs have other batches, and no module is to blame.
        """
        one = next((pair for pair in self.pairs if pair.other_shape and not pair.is_same), None)
        if one is None:
            return None
        is_later = any(value.is_same and value.step == one.step and value.order < one.order for value in self.values)
        return one if is_later else None

    def _given_the_same(self) -> list[Pair]:
        """Return the outputs that differ though all that their module was given is the same to the bit.

        Only those in the step and on the rank of the first difference: later a cache, and another rank, bring it along.
        A module with something in it that differs passes that on.
        """
        if not self.computed:
            return []
        moment = self.computed[0].step, self.computed[0].rank
        now = [one for one in self.computed if one.kind in ("input", "output") and (one.step, one.rank) == moment]
        inside = {name for one in now for name in names_around(one.site)}
        given: dict[ValueKey, bool] = dict.fromkeys(self.not_given, False)
        for value in self.values:
            if value.kind == "input":
                call = value.key.of_call
                given[call] = given.get(call, True) and value.errors.is_equal
        outputs = [one for one in now if one.kind == "output" and one.site not in inside]
        return [one for one in outputs if given.get(one.key.of_call, False)]

    # -- who has made it ---------------------------------------------------------------------------------------

    def _caller_of(self, first: Pair) -> Blame:
        """Blame the module whose own code handed an input over; or the inputs of the model."""
        if not first.site:
            what = "inputs of another shape" if first.other_shape else "other inputs"
            return Blame("", f"The model was given {what}.", first, outside=_INPUTS)
        return self._caller(first, first.site, "hands other values to")

    def _caller(self, first: Pair, site: str, what: str) -> Blame:
        caller = _nearest(site, self.seen)
        what = "hands a tensor of another shape to" if first.other_shape else what
        text = f"The code of {caller or 'the model'} {what} {site}; all that was compared before it is the same."
        return Blame(caller, text, first)

    def _module_or_optimizer(self, first: Pair) -> Blame:
        """Blame the module that returned something else; the optimizer, if that has begun with a step of it.

        An optimizer that updates in another way changes all that it trains: where a trained module that ran before in
        this step returns the same to the bit, it is not the optimizer.
        """
        before = [one for one in self.values if one.kind == "param_grad" and one.step < first.step]
        trained = {one.module for one in before if one.errors.norm_a}
        is_update_same = any(
            one.kind == "output" and one.site in trained and one.errors.is_equal
            and (one.step, one.rank) == (first.step, first.rank) and one.order < first.order
            for one in self.values
        )  # fmt: skip
        if first.site in trained and all(one.is_same for one in before) and not is_update_same:
            return self._optimizer(
                first, f"{first.site or 'The model'} returns something else from step {first.step} on"
            )
        return self._module(first)

    def _loss_or_caller(self, first: Pair) -> Blame:
        """Blame the code that gave another gradient to an output."""
        site = self._outermost(first)
        if not site:
            text = "All that the model returns is the same, and another gradient comes back to it."
            return Blame("", text, first, outside=_LOSS)
        return self._lost(first) or self._caller(first, site, "gives another gradient to")

    def _module_or_lost(self, first: Pair) -> Blame:
        return self._lost(first) or self._module(first)

    def _holder_or_optimizer(self, first: Pair) -> Blame:
        """Blame the module that holds another parameter; the optimizer, if several do after a step."""
        modules = {one.module for one in self.computed if one.kind == "parameter" and one.step == first.step}
        if len(modules) > 1:
            return self._optimizer(first, f"The parameters of {len(modules)} modules differ from step {first.step} on")
        return self._holder(first)

    def _holder(self, first: Pair) -> Blame:
        what = "holds another parameter" if first.kind == "parameter" else "gets another gradient"
        return Blame(first.module, f"{first.module or 'The model'} {what}: {first.site}.", first)

    def _optimizer(self, first: Pair, what: str) -> Blame:
        text = f"{what}, and not before; the gradients are the same: weights were updated in another way."
        return Blame("", text, first, outside=_OPTIMIZER)

    def _gradients(self, first: Pair) -> Blame:
        """Blame the code behind the backward if gradients of many modules differ, and those that arrive do not."""
        grads = [one for one in self.computed if one.kind == "param_grad" and one.step == first.step]
        arrive = [one for one in self.values if one.kind == "output_grad" and one.step == first.step]
        if len({one.module for one in grads}) < 2 or not all(one.is_same for one in arrive):
            return self._holder(first)
        if not arrive:
            text = (
                f"The gradients of {len(grads)} parameters differ, and those that arrive at the modules were not "
                "compared: trace output_grad in both, to tell the backward from what is done to gradients after it."
            )
            return Blame("", text, first, outside="the backward, or the code between it and step")
        text = (
            f"The gradients of {len(grads)} parameters differ, though those that arrive at the modules are the same: "
            "they are changed afterwards (clipping, scaling), or added to others (accumulation, zero_grad)."
        )
        return Blame("", text, first, outside=_BEFORE_STEP)

    def _module(self, first: Pair) -> Blame:
        """Blame the module that returned something else, or handed on another gradient."""
        name, caller = first.site or "The model", _nearest(first.site, self.seen) or "the model"
        other = "something of another shape" if first.other_shape else "something else"
        takes = "input" if first.kind == "output" else "output_grad"
        given = [one for one in self.values if one.kind == takes and one.key.of_call == first.key.of_call]
        if any(first.site in names_around(site) for site in self.seen):
            text = f"All that the modules inside of {name} make is the same; its own code differs."
        elif first.kind == "input_grad":
            text = f"{name} hands on another gradient."
        elif not given:
            text = (
                f"{name} is the first that returns {other}. What it was given was not compared: trace inputs in both, "
                f"to tell it from the code of {caller} around it."
            )
        elif first.key.of_call in self.not_given or any(one.is_unsure for one in given):
            text = (
                f"{name} is the first that returns {other}. Not all that it was given is known to be the same: "
                f"{caller} may be what is wrong."
            )
        else:
            how = "to the bit" if all(one.errors.is_equal for one in given) else "up to rounding"
            text = f"{name} is given the same {how} and returns {other}."
        return Blame(first.site, text, first)

    def _lost(self, first: Pair) -> Blame | None:
        """Blame the module that lets no gradient through in B, if A has that gradient before ``first``."""
        lost = [
            pair
            for pair in self.pairs
            if pair.b is None and pair.kind == "output_grad" and pair.site in self.seen
            and (pair.step, pair.rank) == (first.step, first.rank) and pair.order < first.order
        ]  # fmt: skip
        if not lost:
            return None
        taker = self._taker(lost[0]) or _nearest(lost[0].site, self.seen)
        text = f"No gradient of {taker or 'the model'} reaches {lost[0].site} in B; in A one does."
        return Blame(taker, text, first)

    # -- what is known of values -------------------------------------------------------------------------------

    def _outermost(self, first: Pair) -> str:
        """Return the outermost module whose output has this gradient: the module around it may return the same tensor.

        That is seen by equal numbers, and is empty for the model itself.
        """
        site = first.site
        while site:
            around = _nearest(site, self.seen)
            alike = any(
                (value.site, value.kind, value.step, value.rank) == (around, "output_grad", first.step, first.rank)
                and value.shape == first.shape and value.errors == first.errors
                for value in self.values
            )  # fmt: skip
            if not alike:
                return site
            site = around
        return site

    def _taker(self, gradient: Pair) -> str:
        """Return the outermost module that is given what the module of ``gradient`` returns; empty if it is not known.

        Only traces tell, by the hash: the tensor is the same.
        """
        hashes = {
            id(pair): pair.a.fingerprint.hash
            for pair in self.pairs
            if pair.a is not None and pair.a.fingerprint is not None
            and (pair.step, pair.rank) == (gradient.step, gradient.rank)
        }  # fmt: skip
        here = [pair for pair in self.pairs if id(pair) in hashes]
        made = {hashes[id(one)] for one in here if one.kind == "output" and one.key.of_call == gradient.key.of_call}
        takers = [
            one.site
            for one in here
            if one.kind == "input" and hashes[id(one)] in made and not f"{one.site}.".startswith(f"{gradient.site}.")
        ]
        return min(takers, key=lambda site: site.count("."), default="")


def _nearest(site: str, seen: set[str]) -> str:
    """Return the nearest module around ``site`` that is called: a list of modules is not."""
    return next((name for name in reversed(names_around(site)) if name in seen), "")
