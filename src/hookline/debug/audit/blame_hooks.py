"""Find which hooks change a run: the smallest sets of them that do, by halving.

`audit` calls `find_culprits` with a function that trains with some of the hooks and says where that run first differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hookline.debug.audit.audited_hook import AuditedHook
from hookline.debug.audit.run_state import Difference

__all__ = ["Culprit", "find_culprits"]

_Trial: TypeAlias = Callable[[Sequence[AuditedHook]], Difference | None]


@dataclass(frozen=True)
class Culprit:
    """A hook that changes the run by itself; or several of which none can be left out: they change it together."""

    hooks: tuple[str, ...]
    """The names: one, or those of an interaction."""
    difference: Difference
    """Where the run with these hooks alone first differs."""

    @property
    def is_interaction(self) -> bool:
        """Whether several hooks are needed."""
        return len(self.hooks) > 1


def find_culprits(hooks: Sequence[AuditedHook], whole: Difference, try_with: _Trial) -> list[Culprit]:
    """Return every culprit among ``hooks``, which change the run when all are on; the earliest step first.

    Args:
        hooks: All that were on.
        whole: Where the run with all of them differs.
        try_with: Trains with some of them, from the same start, and returns where that differs.
    """
    known: dict[tuple[str, ...], Difference | None] = {_names(hooks): whole}

    def differs(some: Sequence[AuditedHook]) -> Difference | None:
        if _names(some) not in known:
            known[_names(some)] = try_with(some) if some else None
        return known[_names(some)]

    left, found = list(hooks), []
    while left and differs(left) is not None:
        smallest = _smallest(left, differs)
        difference = differs(smallest)
        assert difference is not None
        found.append(Culprit(_names(smallest), difference))
        left = [hook for hook in left if hook not in smallest]
    return sorted(found, key=lambda culprit: culprit.difference.step)


def _smallest(hooks: list[AuditedHook], differs: _Trial) -> list[AuditedHook]:
    """Return a set that changes the run and of which none can be left out (delta debugging, after Zeller)."""
    parts = 2
    while len(hooks) > 1:
        pieces = [hooks[len(hooks) * i // parts : len(hooks) * (i + 1) // parts] for i in range(parts)]
        guilty = next((piece for piece in pieces if differs(piece) is not None), None)
        if guilty is not None:
            hooks, parts = guilty, 2
            continue
        rests = [[hook for hook in hooks if hook not in piece] for piece in pieces] if parts > 2 else []
        guilty = next((rest for rest in rests if differs(rest) is not None), None)
        if guilty is not None:
            hooks, parts = guilty, max(parts - 1, 2)
        elif parts >= len(hooks):
            break
        else:
            parts = min(2 * parts, len(hooks))
    return hooks


def _names(hooks: Sequence[AuditedHook]) -> tuple[str, ...]:
    return tuple(hook.name for hook in hooks)
