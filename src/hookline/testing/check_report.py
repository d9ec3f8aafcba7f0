"""What `check_hook` found out about a hook, as a table and as an error.

Filled by the checks, handed to the author of the hook.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.errors import HookCheckError

__all__ = ["Finding", "HookCheck"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a hook does not do as hooks promise.

    Recipe: ``[finding.check for finding in report.findings]``.
    """

    check: str
    """Which check: ``"inert"``, ``"state"``, …"""
    text: str
    """What was asked, what was found, what to do next."""


@dataclass(repr=False)
class HookCheck:
    """What came of checking a hook; prints as a table.

    Recipe: ``print(hookline.testing.check_hook(MyHook))``.
    """

    hook: str
    """Its name."""
    passed: dict[str, str] = field(default_factory=dict)
    """The checks that found nothing, and what they did."""
    findings: list[Finding] = field(default_factory=list)
    """What was found."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The checks that could not be made, and why."""
    notes: list[str] = field(default_factory=list)
    """What is no fault, but good to know."""
    metrics: tuple[str, ...] = ()
    """The metrics that it returned, without its name."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_if_any(self) -> None:
        """All findings at once, as one error."""
        if self.findings:
            number = f"{len(self.findings)} finding" + ("s" if len(self.findings) > 1 else "")
            lines = [f"  {finding.check}: {finding.text}" for finding in self.findings]
            raise HookCheckError("\n".join([f"Hook {self.hook!r} has {number}.", *lines]))

    def __repr__(self) -> str:
        rows = [("ok", check, text) for check, text in self.passed.items()]
        rows += [("found", finding.check, finding.text) for finding in self.findings]
        rows += [("skipped", check, text) for check, text in self.skipped.items()]
        rows += [("note", "", text) for text in self.notes]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"{state.ljust(widths[0])}  {check.ljust(widths[1])}  {text}" for state, check, text in rows]
        return "\n".join([f"hook {self.hook!r}, metrics: {', '.join(self.metrics) or 'none'}", *lines])
