"""Hold and show what an audit found.

`audit` returns an `Audit`; ``hookline audit`` prints it and takes its exit code from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hookline.debug.audit.blame_hooks import Culprit
from hookline.debug.audit.run_state import Difference
from hookline.tables import ShownAsTable, Table

__all__ = ["Audit"]


@dataclass(frozen=True, repr=False)
class Audit(ShownAsTable):
    """What `hookline.audit` found; prints as a table.

    Recipe: ``assert hookline.audit(train, hooks).ok``.
    """

    hooks: tuple[str, ...]
    """The names of the hooks."""
    steps: int
    """How many steps each training made."""
    trainings: int
    """How often was trained."""
    difference: Difference | None = None
    """Where the run with all hooks first differs; None if it is the same to the last bit."""
    culprits: Sequence[Culprit] = ()
    """The hooks that change the run, alone or together; the earliest step first."""
    not_repeatable: Difference | None = None
    """Where two trainings without hooks differ; then nothing can be said of hooks."""
    left_behind: Difference | None = None
    """Where a training without hooks, made after they were taken off, differs from those before."""
    end_differs: tuple[str, ...] = ()
    """What differs when the trainings have ended: the final weights, say."""
    silent: tuple[str, ...] = ()
    """Lifecycle hooks that did not fire in these steps, or turned themselves off: nothing can be said of them."""
    leftovers: tuple[str, ...] = ()
    """The switches and the hooks of torch that are not as without hooks when the hooks are off."""
    notes: list[str] = field(default_factory=list)
    """What else is worth knowing."""

    @property
    def ok(self) -> bool:
        """Whether the run is the same with the hooks and without, to the last bit."""
        return self.verdict == "same"

    @property
    def verdict(self) -> str:
        """``"same"``, ``"changed"``, ``"not repeatable"``, or ``"cannot be told"`` where a hook did not fire."""
        if self.not_repeatable is not None:
            return "not repeatable"
        if self.difference is not None or self.left_behind is not None:
            return "changed"
        return "cannot be told" if self.silent else "same"

    @property
    def first_step(self) -> int | None:
        """The first step that differs, counted from 0; None if none does."""
        return None if self.difference is None else self.difference.step

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {"ok": self.ok, "verdict": self.verdict, **asdict(self)}

    def _table(self) -> Table:
        rows = [(name, *self._row(name)) for name in self.hooks] if self.not_repeatable is None else []
        header = ("hook", "finding", "differs first at", "what differs first")
        foot = list(self.notes)
        if self.leftovers:
            foot.append(f"Left on by the hooks: {', '.join(self.leftovers)}.")
        if self.silent:
            foot.append("Next, for hooks that did not fire: audit more steps, or give them what they need to measure.")
        return Table(header if rows else (), rows, title=self._headline(), foot=foot)

    def _headline(self) -> str:
        length = f"{self.steps} step{'s' * (self.steps != 1)}"
        if self.not_repeatable is not None:
            return f"Not repeatable: two trainings of {length} without hooks differ: {self.not_repeatable}."
        on = f"{len(self.hooks)} hook{'s' * (len(self.hooks) != 1)}"
        if self.difference is not None:
            return f"Changed: {length} with {on} differ from {length} without: {self.difference}."
        if self.left_behind is not None:
            return f"Changed: {on} left something behind; the training after them differs: {self.left_behind}."
        if self.silent:
            return (
                f"Cannot be told: of {on}, {', '.join(self.silent)} did not fire in {length}; the rest changes no bit."
            )
        return f"Same: {length} with and without {on} are the same to the last bit."

    def _row(self, name: str) -> tuple[str, str, str]:
        mine = next((one for one in self.culprits if name in one.hooks), None)
        if mine is None:
            unknown = self.verdict == "changed" and not self.culprits
            return "did not fire" if name in self.silent else "not known" if unknown else "changes nothing", "", ""
        others = " and ".join(other for other in mine.hooks if other != name)
        did = "raises" if mine.difference.first.startswith("error: ") else "changes the run"
        finding = f"{did}, only together with {others}" if others else did
        more = f" (and {len(mine.difference.names) - 1} more)" if len(mine.difference.names) > 1 else ""
        return finding, mine.difference.where, f"{mine.difference.first}{more}"
