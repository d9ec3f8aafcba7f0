"""Check what a hook declares: its name and points before it runs, the names and descriptions of its metrics after.

`check_hook` calls both; what is wrong goes into its report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hookline.errors import HooklineError
from hookline.lifecycle import registry as check
from hookline.lifecycle.hook import MetricInfo, TrainingHook
from hookline.testing.check_report import Finding, HookCheck
from hookline.when import validate_points

__all__ = ["check_declaration", "check_names"]

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def check_declaration(hook: TrainingHook, report: HookCheck) -> bool:
    """Add what is wrong with a declaration to the report; return whether the hook can be run."""
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


def check_names(hook: TrainingHook, metrics: Iterable[str], report: HookCheck) -> None:
    """Add what is wrong with the names and descriptions of metrics to the report."""
    texts = [text for name in metrics for text in _wrong(hook.name, name)]
    report.findings += [Finding("names", text) for text in texts]
    if not texts:
        report.passed["names"] = "metrics have plain names"
    described = _description(hook, list(metrics))
    report.findings += [Finding("described", text) for text in described]
    if not described:
        report.passed["described"] = "describe_metrics() tells what each metric means"


def _wrong(hook: str, name: str) -> list[str]:
    if name.startswith(f"{hook}/"):
        short = name.removeprefix(f"{hook}/") or "value"
        return [
            f"A metric is reported as 'hook/metric', and {name!r} would read {f'{hook}/{name}'!r}. Next: return it as "
            f"{short!r}."
        ]
    if name != name.strip() or not name.isprintable() or "//" in name or name.startswith("/") or name.endswith("/"):
        return [
            f"Names of metrics are words with single slashes between, and {name!r} is not. Next: leave blanks, "
            "control characters and empty parts out."
        ]
    return []


def _description(hook: TrainingHook, metrics: list[str]) -> list[str]:
    infos = list(hook.describe_metrics() or ())
    strangers = [info for info in infos if not isinstance(info, MetricInfo)]
    if strangers:
        return [f"describe_metrics() gives a list of MetricInfo, and {strangers[0]!r} is none. Next: make it one."]
    patterns = [_pattern(info.name) for info in infos]
    missing = [name for name in metrics if not any(pattern.fullmatch(name) for pattern in patterns)]
    if not missing:
        return []
    return [
        f"describe_metrics() tells what each metric means, and says nothing of {', '.join(map(repr, missing[:5]))}"
        f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}. Next: return [MetricInfo({missing[0]!r}, "
        "'what it measures'), …] there; 'norm/{layer}' stands for all of that kind."
    ]


def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for a name with places in braces."""
    return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))), re.DOTALL)
