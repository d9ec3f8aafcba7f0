"""Decide which passes through a model count under ``during=``, also in a loop that does not say what it is doing.

Asked by watches, trackers and captures at each firing. The loops of hookline and `in_phase` say what the run is doing;
elsewhere a pass is judged by the model: training is a forward that began in training mode with gradients on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from hookline.lifecycle.run_phase import Phases, told_phase

__all__ = ["During"]

_TRAINING: Final = 2


class During:
    """What ``during=`` asks for, and what was left out because of it.

    Where ``"train"`` is asked for and nothing says what is training, the passes that are most like it so far count:
    in training mode with gradients on, else with gradients on, else any. So a model that is only ever evaluated is
    seen, and one that trains in evaluation mode too. When a pass comes that is more like training, `forget` is called,
    because what was counted until then was an evaluation before training; unless a step was made by then.

    Args:
        phases: What counts, as ``during=`` names it.
        forget: Drops what was counted so far.
    """

    def __init__(self, phases: Phases, forget: Callable[[], None] = lambda: None) -> None:
        self.phases = phases
        self.left_out = 0
        """How many forwards were left out because they were no training, or no evaluation."""
        self.counted = 0
        """How many forwards counted."""
        self.best = -1
        """How much like training a forward was at most: 0 without gradients, 1 with them, 2 in training mode too."""
        self._forget = forget
        self._has_stepped = False
        self._last: Hashable = None

    def takes_forward(self, training: bool, gradients: bool, which: Hashable) -> bool:
        """Return whether a forward counts that began in `training` mode with `gradients` on; ``which`` names it."""
        told = told_phase()
        takes = self._takes(training + 1 if gradients else 0, raises=True) if told is None else told in self.phases
        if which != self._last and told is None:  # several modules ask about one forward
            self._last = which
            self.counted += takes
            self.left_out += not takes
        return takes

    def takes_backward(self, training: bool) -> bool:
        """Return whether a backward pass counts that comes through a model in `training` mode."""
        told = told_phase()
        return self._takes(training + 1, raises=False) if told is None else told in self.phases

    def step_was_made(self) -> None:
        """Note that an optimizer has made a step: what came before it was training, whatever the mode."""
        self._has_stepped = self._has_stepped or self.best > 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        numbers = {"left_out": self.left_out, "counted": self.counted, "best": self.best}
        return numbers | {"has_stepped": self._has_stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.left_out, self.counted, self.best = state["left_out"], state["counted"], state["best"]
        self._has_stepped = state["has_stepped"]

    def _takes(self, likeness: int, *, raises: bool) -> bool:
        if likeness < _TRAINING and "eval" in self.phases:
            return True
        if "train" not in self.phases:
            return False
        if likeness > self.best and raises and not self._has_stepped:
            if self.counted and "eval" not in self.phases:
                self._forget()
                self.left_out, self.counted = self.left_out + self.counted, 0
            self.best = likeness
        return likeness >= self.best

    def in_words(self) -> str:
        """Return a sentence about what was left out, and how to have it; nothing if nothing was."""
        if not self.left_out:
            return ""
        forwards = "1 forward" if self.left_out == 1 else f"{self.left_out} forwards"
        if "train" not in self.phases:
            return f"left out: {forwards} in training mode with gradients on; during={{'train', 'eval'}} counts them"
        return f"left out: {forwards} in evaluation mode or without gradients; during={{'train', 'eval'}} counts them"
