"""Make one answer of the answers of all workers; plain functions, for `VllmHooks` and the endpoint plugin.

Each worker answers ``{"rank": 0, …}``, or ``{"rank": 0, "error": {"type", "message"}}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hookline import errors
from hookline.errors import HooklineError, OptionError

__all__ = ["check_answers", "error_of", "merge_added", "merge_hook", "merge_hooks", "merge_metrics"]

_Answer = Mapping[str, Any]
_NO_MATCH: Final = "NoMatchError"


def error_of(answers: Sequence[_Answer]) -> HooklineError | None:
    """Return the first error of the workers, as the class it had there if hookline has it; None if there is none."""
    for answer in answers:
        error = answer.get("error")
        if error is not None:
            kind: Any = getattr(errors, str(error["type"]), None)
            is_ours = isinstance(kind, type) and issubclass(kind, HooklineError)
            text = str(error["message"]) if is_ours else f"{error['type']}: {error['message']}"
            made: HooklineError = (kind if is_ours else OptionError)(text)
            return made
    return None


def merge_added(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return the hooks that workers have attached; raise what went wrong, where that concerns all of them.

    A worker that has no module of that name (of another pipeline stage) is named in ``missing_on``. Where one worker
    failed in another way, its error is raised: the caller removes the hooks from the others.
    """
    failed = [answer for answer in answers if answer.get("error") is not None]
    serious = [answer for answer in failed if answer["error"]["type"] != _NO_MATCH]
    if serious or len(failed) == len(answers):
        error = error_of(serious or failed)
        assert error is not None
        raise error
    merged = merge_hooks([answer for answer in answers if answer.get("error") is None])
    missing = [int(answer["rank"]) for answer in failed]
    return [{**hook, "missing_on": sorted({*hook["missing_on"], *missing})} for hook in merged]


def merge_hooks(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return the hooks of all workers, one entry for each id, in the order of their numbers."""
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:
        for hook in answer.get("hooks", ()):
            by_id.setdefault(hook["id"], []).append(hook)
    ranks = [int(answer["rank"]) for answer in answers]
    return [merge_hook(by_id[id], ranks) for id in sorted(by_id, key=lambda each: int(each[1:]))]


def merge_hook(hooks: Sequence[Mapping[str, Any]], ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Return one hook as all workers see it.

    A module that several workers have (tensor parallelism) counts the least of their firings: a worker that misses one
    is not hidden by the others. Modules of different workers (pipeline stages) add up.
    """
    first = hooks[0]
    sites: dict[str, int] = {}
    for hook in hooks:
        for name, fired in hook["sites"].items():
            sites[name] = min(fired, sites.get(name, fired))
    errors_seen = [hook for hook in hooks if hook["last_error"]]
    costs = [hook["cost_us"] for hook in hooks if hook["cost_us"] is not None]
    steps = [hook["last_step"] for hook in hooks if hook["last_step"] is not None]
    return {
        **{key: value for key, value in first.items() if key != "rank"},
        "matched": list(sites),
        "fired": sum(sites.values()),
        "fired_by_rank": {str(hook["rank"]): sum(hook["sites"].values()) for hook in hooks},
        "last_step": max(steps) if steps else None,
        "cost_us": max(costs) if costs else None,
        "errors": sum(hook["errors"] for hook in hooks),
        "off": any(hook["off"] for hook in hooks),
        "last_error": errors_seen[0]["last_error"] if errors_seen else None,
        "sites": sites,
        "silent": {name: cause for hook in hooks for name, cause in hook["silent"].items()},
        "missing_on": sorted(set(ranks) - {int(hook["rank"]) for hook in hooks}),
    }


def merge_metrics(answers: Sequence[_Answer]) -> dict[str, dict[str, float]]:
    """Return the metrics of each hook: those of the first rank, others under ``rank1/…`` where they differ."""
    merged: dict[str, dict[str, float]] = {}
    for answer in answers:
        for id, metrics in answer.get("metrics", {}).items():
            known = merged.setdefault(id, {})
            for name, value in metrics.items():
                if name not in known:
                    known[name] = value
                elif known[name] != value:
                    known[f"rank{answer['rank']}/{name}"] = value
    return merged


def check_answers(answers: Sequence[_Answer]) -> None:
    """Raise the first error of the workers, if there is one."""
    error = error_of(answers)
    if error is not None:
        raise error
