"""Whether what a hook declares makes sense, before it is run.

Asked by `check_hook`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.errors import HooklineError
from hookline.lifecycle.points import validate_points
from hookline.testing.check_report import Finding, HookCheck
from hookline.training import registry as check
from hookline.training.training_hook import TrainingHook

__all__ = ["check_declaration"]


def check_declaration(hook: TrainingHook, report: HookCheck) -> bool:
    """Whether it can be run at all; what is wrong goes into the report."""
    before = len(report.findings)
    try:
        check.check_hook(hook)
    except HooklineError as error:
        report.findings.append(Finding("signature", str(error)))
    report.findings += [Finding("signature", text) for text in _shadowed(hook)]
    if not isinstance(hook.name, str) or not hook.name or "/" in hook.name or hook.name != hook.name.strip():
        report.findings.append(
            Finding(
                "name",
                f"Metrics are reported as 'name/metric', and the name is {hook.name!r}. Next: give it a name without "
                "slashes and without blanks around it.",
            )
        )
    report.findings += [Finding("points", text) for text in _wrong_points(hook)]
    if len(report.findings) == before:
        report.passed["points"] = "it declares when it is due"
    return len(report.findings) == before


def _shadowed(hook: TrainingHook) -> list[str]:
    methods = [name for name, value in vars(TrainingHook).items() if callable(value) and not name.startswith("_")]
    return [
        f"{name!r} is a method of hooks, and here it is {getattr(hook, name)!r}. Next: call that something else."
        for name in methods
        if not callable(getattr(hook, name))
    ]


def _wrong_points(hook: TrainingHook) -> list[str]:
    by_loop: Any = hook.loop_points
    if by_loop is not None and not isinstance(by_loop, Mapping):
        return [f"loop_points is a dictionary with 'epoch' and 'step'; got {by_loop!r}. Next: make it one."]
    texts = [
        f"loop_points has an entry for {loop!r}, and the loops are 'epoch' and 'step'. Next: name it so."
        for loop in by_loop or ()
        if loop not in ("epoch", "step")
    ]
    for points in [hook.hook_points, *(by_loop or {}).values()]:
        try:
            validate_points(points or ())
        except (HooklineError, TypeError) as error:
            texts.append(f"{error} Next: take points of HookPoint.")
    if not texts and not any(map(bool, [hook.hook_points, *(by_loop or {}).values()])):
        texts.append("It has no point, so it never fires. Next: hook_points = {HookPoint.POST_EPOCH}, say.")
    return texts
