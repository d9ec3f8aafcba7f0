"""Whether the metrics of a hook have good names, and whether someone says what they mean.

Asked by `check_hook`, with the metrics that came in its runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hookline.testing.check_report import Finding, HookCheck
from hookline.training.training_hook import MetricInfo, TrainingHook

__all__ = ["check_names"]

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def check_names(hook: TrainingHook, metrics: Iterable[str], report: HookCheck) -> None:
    """What is wrong with them goes into the report."""
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
    """What a name with places in braces stands for."""
    return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))), re.DOTALL)
