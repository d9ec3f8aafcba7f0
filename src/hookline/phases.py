"""Say what the run is doing (train, eval, intervention), and decide which passes ``during=`` counts.

Whoever runs the model enters `in_phase`: the loops (training/run.py), runs of other trainers
(integrations/host_run.py), `HookManager` around hooks, and tools that make passes of their own (``debug.first_bad``,
``debug.parity``). Watches, the trackers of metta/builders.py and analyses/weights.py ask `During` whether a pass
counts; captures do not. Among those that ask `phase` alone are watches at an optimizer's step, step alarms, audits,
``debug.first_bad``, traces, analyses/gradients.py and ``integrations``. `kept_modes` and `in_eval_mode` serve
evaluations (training/run.py), ``debug.parity`` and guard/model_context.py.

The phase is one for the whole process, not one for each thread: on CUDA a backward runs in a thread of its own. Where
nobody has entered one, a forward that began in training mode with gradients on is training.

The names in `PHASES` are compared as texts: search all folders for ``"intervention"`` before you change one. What
`During.state_dict` returns is in the state of a watch (observe/watch/watch.py), which checkpoints hold: keep its keys.
Tests: tests/observe/watch/test_watch_steps.py and tests/training/test_interventions.py, among others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

PHASES: Final = ("train", "eval", "intervention")
Phases = frozenset[str]


class _Entered:
    # Of the process, not of a context: on CUDA the backward runs in a thread that has no context of ours. One object,
    # since to set an attribute of a class empties Python's cache of the class each time.
    __slots__ = ("lock", "phase", "stack")

    def __init__(self) -> None:
        self.phase = "train"
        self.stack: list[list[str]] = []
        """The phases that were entered and not left, oldest first; each in a list of its own, so that a block finds its
        own one."""
        self.lock = threading.Lock()


ENTERED: Final = _Entered()
"""Has the `phase` as an attribute, for what runs at every step or firing: a call takes 1.5 µs there."""


def phase() -> str:
    """Return the phase that was entered last, by whichever thread; "train" if none was."""
    return ENTERED.phase


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Put each module back into its own mode when the block ends: some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode for a block, and each back into its own."""
    with kept_modes(model):
        model.eval()
        yield


def known_phase() -> str | None:
    """Return the phase that was entered last, by whichever thread; None if none was entered."""
    return ENTERED.phase if ENTERED.stack else None


class in_phase:
    """Set the phase for as long as the block lasts. One may be entered again, also inside itself."""

    # A class, as every firing enters one: 1 µs, and 3 as a generator.
    __slots__ = ("_mine",)

    def __init__(self, name: str) -> None:
        self._mine = [name] if name in PHASES else list(validate_phases([name]))

    def __enter__(self) -> None:
        entered, mine = ENTERED, self._mine
        with entered.lock:
            entered.stack.append(mine)
            entered.phase = mine[0]

    def __exit__(self, *exc_info: object) -> None:
        entered, mine = ENTERED, self._mine
        with entered.lock:
            stack = entered.stack
            place = -1
            while stack[place] is not mine:  # another thread has entered since, and has not left
                place -= 1
            del stack[place]
            entered.phase = stack[-1][0] if stack else "train"


def validate_phases(during: str | Iterable[str]) -> Phases:
    """Return the phases that ``during=`` names."""
    names = frozenset([during] if isinstance(during, str) else during)
    unknown = sorted(names - set(PHASES))
    if unknown or not names:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise OptionError(f"during= names phases of a run: {', '.join(map(repr, PHASES))}; got {got}.")
    return names


_TRAINING: Final = 2
"""How much like training a forward in training mode with gradients on is; see `During.best`."""


class During:
    """Decide which passes count, and how many were left out.

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

    def count_forward(self, training: bool, gradients: bool, which: Hashable) -> bool:
        """Count a forward that began in `training` mode with `gradients` on; return whether it counts.

        ``which`` names the forward: several modules may ask about one, which is counted once.
        """
        told = known_phase()
        counts = self._judge(training + 1 if gradients else 0, sets_best=True) if told is None else told in self.phases
        if which != self._last and told is None:
            self._last = which
            self.counted += counts
            self.left_out += not counts
        return counts

    def counts_backward(self, training: bool) -> bool:
        """Return whether a backward pass counts that comes through a model in `training` mode."""
        told = known_phase()
        return self._judge(training + 1, sets_best=False) if told is None else told in self.phases

    def note_step(self) -> None:
        """Note that an optimizer has made a step: what came before was training in any mode, and is not forgotten.

        If no forward had gradients, the step was of something else and says nothing.
        """
        self._has_stepped = self._has_stepped or self.best > 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        numbers = {"left_out": self.left_out, "counted": self.counted, "best": self.best}
        return numbers | {"has_stepped": self._has_stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.left_out, self.counted, self.best = state["left_out"], state["counted"], state["best"]
        self._has_stepped = state["has_stepped"]

    def _judge(self, likeness: int, *, sets_best: bool) -> bool:
        """Return whether a pass counts that is so much like training, 0 to 2 as `best`.

        With ``sets_best`` (a forward), one that is more like training than all before becomes the best, and what was
        counted until then is forgotten. A backward changes nothing: its forward has been judged.
        """
        if likeness < _TRAINING and "eval" in self.phases:
            return True
        if "train" not in self.phases:
            return False
        if likeness > self.best and sets_best and not self._has_stepped:
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
