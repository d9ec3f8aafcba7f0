"""Make one answer of the answers of all workers; plain functions, for `VllmHooks` and the HTTP routes.

Each worker answers ``{"rank": 0, …}``, or ``{"rank": 0, "error": {"type", "message"}}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hookline import errors
from hookline.errors import HooklineError, OptionError

__all__ = [
    "check_answers",
    "error_of",
    "merge_added",
    "merge_flags",
    "merge_hooks",
    "merge_metrics",
    "merge_removed",
    "merge_results",
]

_Answer = Mapping[str, Any]
_NO_MATCH: Final = "NoMatchError"
"""What a worker answers that does not have the module: it is of another pipeline stage."""


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


def _serious(answers: Sequence[_Answer]) -> HooklineError | None:
    """Return the error of a worker that is more than the lack of a module; of any if all have one."""
    failed = [answer for answer in answers if answer.get("error") is not None]
    serious = [answer for answer in failed if answer["error"]["type"] != _NO_MATCH]
    return error_of(serious or failed) if serious or len(failed) == len(answers) else None


def merge_added(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return the hooks that workers have attached; raise what went wrong, where that concerns all of them.

    A worker that has no module of that name (of another pipeline stage) is named in ``missing_on``. Where one worker
    failed in another way, its error is raised: the caller removes the hooks from the others.
    """
    error = _serious(answers)
    if error is not None:
        raise error
    merged = merge_hooks([answer for answer in answers if answer.get("error") is None])
    missing = [int(answer["rank"]) for answer in answers if answer.get("error") is not None]
    return [{**hook, "missing_on": sorted({*hook["missing_on"], *missing})} for hook in merged]


def merge_hooks(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return the hooks of all workers, one entry for each id, in the order of their numbers."""
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:
        for hook in answer.get("hooks", ()):
            by_id.setdefault(hook["id"], []).append(hook)
    ranks = [int(answer["rank"]) for answer in answers]
    return [_merge_hook(by_id[id], ranks) for id in sorted(by_id, key=lambda each: int(each[1:]))]


def merge_removed(answers: Sequence[_Answer]) -> dict[str, Any]:
    """Return the last figures of a hook that workers have removed; raise if none of them had it."""
    found = [answer["hook"] for answer in answers if answer.get("error") is None]
    if not found:
        check_answers(answers)
    return _merge_hook(found, [int(answer["rank"]) for answer in answers])


def _merge_hook(hooks: Sequence[Mapping[str, Any]], ranks: Sequence[int] = ()) -> dict[str, Any]:
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


def merge_results(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return what the requests under one key asked for, one entry for each, as all workers have it.

    An entry has ``request``, ``states`` (``{"dtype", "shape", "positions", "data"}`` for each layer, with bytes as
    data), ``silent``, ``hooks``, ``flags``, ``prompt_tokens``, ``not_computed``, and ``error``: None, or ``{"type",
    "message"}``.

    Raises:
        HookNameError: No worker keeps anything for that key.
    """
    good = [answer for answer in answers if answer.get("error") is None]
    if not good:
        check_answers(answers)
    by_request: dict[str, list[_Answer]] = {}
    for answer in sorted(good, key=lambda each: int(each["rank"])):
        for entry in answer["answers"]:
            by_request.setdefault(entry["request"], []).append(entry)
    return [_merge_result(entries) for entries in by_request.values()]


def _merge_result(entries: Sequence[_Answer]) -> dict[str, Any]:
    error = _serious(entries)
    states: dict[str, Any] = {}
    for entry in entries:
        for name, layer in entry["states"].items():
            if not states.get(name, {}).get("positions"):
                states[name] = layer
    silent = {name: cause for entry in entries for name, cause in entry["silent"].items()}
    plain = None if error is None else {"type": type(error).__name__, "message": str(error)}
    return {
        **entries[0],
        "error": plain,
        "states": states,
        "silent": {name: cause for name, cause in silent.items() if name not in states},
        "hooks": _hooks_of_request([entry["hooks"] for entry in entries]),
        "flags": merge_flags([entry["flags"] for entry in entries]),
    }


def _hooks_of_request(workers: Sequence[Sequence[_Answer]]) -> list[dict[str, Any]]:
    """Return the hooks of a request as all workers saw them: figures of the first, errors of all."""
    found = []
    for same in zip(*(hooks for hooks in workers if hooks), strict=False):
        errors_seen = [each["last_error"] for each in same if each["last_error"]]
        total = sum(each["errors"] for each in same)
        found.append({**same[0], "errors": total, "last_error": errors_seen[0] if errors_seen else None})
    return found


def merge_flags(workers: Sequence[Sequence[_Answer]]) -> list[dict[str, Any]]:
    """Return the flags of a request, one for each probe and module; a module may be in several workers or in one.

    Of two probes of one name, the first is the first in every worker. Workers of one pipeline stage see the same
    tokens, so that nothing is added up.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for flags in workers:
        seen: Counter[tuple[str, str]] = Counter()
        for flag in flags:
            named = flag["probe"], flag["module"]
            place = *named, seen[named]
            seen[named] += 1
            known = found.setdefault(place, dict(flag))
            positions = [each["position"] for each in (known, flag) if each["position"] is not None]
            found[place] = {
                **known,
                "tokens": max(known["tokens"], flag["tokens"]),
                "position": min(positions, default=None),
                "score": max(known["score"], flag["score"]),
                "stopped": known["stopped"] or flag["stopped"],
            }
    return list(found.values())
