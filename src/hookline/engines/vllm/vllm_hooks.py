"""Attach, list and remove hooks in all workers of an ``LLM`` of vLLM, from the program that made it.

Users call `VllmHooks`. It calls the methods of `HookExtension` over ``collective_rpc``. Each worker answers ``{"rank":
0, …}``, or ``{"rank": 0, "error": {"type", "message"}}``; the functions below make one answer of all, here and for the
HTTP routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hookline import errors
from hookline.engines.hidden_states import StatesOfLayer
from hookline.errors import HooklineError, HookNameError, OptionError

__all__ = [
    "RequestAnswer",
    "VllmHooks",
    "check_answers",
    "merge_added",
    "merge_hooks",
    "merge_metrics",
    "merge_removed",
    "merge_results",
]

_Found = list[dict[str, Any]]  # `VllmHooks` has a method of that name
_Answer = Mapping[str, Any]
_NO_MATCH: Final = "NoMatchError"
"""What a worker answers that does not have the module: it is of another pipeline stage."""


def check_answers(answers: Sequence[_Answer], *, may_miss: bool = False) -> None:
    """Raise the first error of the workers, as the class it had there if hookline has it.

    With ``may_miss``, the lack of a module is no error, unless all lack it: other pipeline stages have it.
    """
    failed = [answer["error"] for answer in answers if answer.get("error") is not None]
    serious = [error for error in failed if not may_miss or error["type"] != _NO_MATCH]
    if may_miss and len(failed) == len(answers):
        serious = serious or failed
    if serious:
        name, text = str(serious[0]["type"]), str(serious[0]["message"])
        kind: Any = getattr(errors, name, None)
        is_ours = isinstance(kind, type) and issubclass(kind, HooklineError)
        raise kind(text) if is_ours else OptionError(f"{name}: {text}")


def _good(answers: Sequence[_Answer]) -> Sequence[_Answer]:
    """Return the answers without an error, by rank; raise if there is none."""
    good = [answer for answer in answers if answer.get("error") is None]
    if not good:
        check_answers(answers)
    return sorted(good, key=lambda each: int(each["rank"]))


def merge_added(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return the hooks that workers have attached; raise what went wrong, where that concerns all of them.

    A worker that has no module of that name (of another pipeline stage) is named in ``missing_on``. Where one worker
    failed in another way, its error is raised: the caller removes the hooks from the others.
    """
    check_answers(answers, may_miss=True)
    return merge_hooks(answers)


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
    return _merge_hook([answer["hook"] for answer in _good(answers)], [int(answer["rank"]) for answer in answers])


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


def merge_results(answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """Return what the requests under one key asked for, one entry for each, as all workers have it.

    An entry has ``request``, ``states`` (``{"dtype", "shape", "positions", "data"}`` for each layer, with bytes as
    data), ``silent``, ``hooks``, ``flags``, ``prompt_tokens``, ``not_computed``, and ``error``: None, or ``{"type",
    "message"}``.

    Raises:
        HookNameError: No worker keeps anything for that key.
    """
    by_request: dict[str, list[_Answer]] = {}
    for answer in _good(answers):
        for entry in answer["answers"]:
            by_request.setdefault(entry["request"], []).append(entry)
    return [_merge_result(entries) for entries in by_request.values()]


def _merge_result(entries: Sequence[_Answer]) -> dict[str, Any]:
    failure = None
    try:
        check_answers(entries, may_miss=True)
    except HooklineError as error:
        failure = {"type": type(error).__name__, "message": str(error)}
    states: dict[str, Any] = {}
    for entry in entries:
        for name, layer in entry["states"].items():
            if not states.get(name, {}).get("positions"):
                states[name] = layer
    silent = {name: cause for entry in entries for name, cause in entry["silent"].items() if name not in states}
    hooks = [entry["hooks"] for entry in entries if entry["hooks"]]
    return {
        **entries[0],
        "error": failure,
        "states": states,
        "silent": silent,
        "hooks": [_hook_of_request(same) for same in zip(*hooks, strict=False)],
        "flags": _merge_flags([entry["flags"] for entry in entries]),
    }


def _hook_of_request(workers: Sequence[_Answer]) -> dict[str, Any]:
    """Return a hook of a request as all workers saw it: figures of the first, errors of all."""
    last = next((hook["last_error"] for hook in workers if hook["last_error"]), None)
    return {**workers[0], "errors": sum(hook["errors"] for hook in workers), "last_error": last}


def _merge_flags(workers: Sequence[Sequence[_Answer]]) -> list[dict[str, Any]]:
    """Return the flags of a request: those at a module from the first worker that has any there.

    Workers of one pipeline stage see the same tokens, so that nothing is added up.
    """
    by_module: dict[str, list[dict[str, Any]]] = {}
    for flags in workers:
        known = set(by_module)
        for flag in flags:
            if flag["module"] not in known:
                by_module.setdefault(flag["module"], []).append(dict(flag))
    return [flag for found in by_module.values() for flag in found]


# -- for programs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestAnswer:
    """What one request asked for, and how many of its tokens no hook has seen."""

    states: dict[str, StatesOfLayer]
    """Hidden states by the name of the layer."""
    prompt_tokens: int
    not_computed: int
    """How many tokens of the prompt were taken from the prefix cache."""
    hooks: list[dict[str, Any]]
    """What the hooks of this request did: name, modules, rows, errors, metrics."""
    flags: list[dict[str, Any]]
    """What probes flagged in this request: probe, module, tokens, position, score, stopped."""
    silent: dict[str, str]
    """Layers that were asked for and did not fire, with the cause."""

    @classmethod
    def of(cls, merged: Mapping[str, Any]) -> RequestAnswer:
        """Return an entry of `merge_results` with tensors in place of bytes; raise the error that it has."""
        check_answers([merged])
        states = {
            name: StatesOfLayer(list(layer["positions"]), _tensor(layer)) for name, layer in merged["states"].items()
        }
        rest = ("prompt_tokens", "not_computed", "hooks", "flags", "silent")
        return cls(states, *(merged[name] for name in rest))


def _tensor(layer: Mapping[str, Any]) -> torch.Tensor:
    if not layer["data"]:
        return torch.empty(layer["shape"])
    return torch.frombuffer(bytearray(layer["data"]), dtype=getattr(torch, layer["dtype"])).reshape(layer["shape"])


class VllmHooks:
    """The hooks of an engine.

    Recipe::

        hooks = VllmHooks(llm)
        added = hooks.add({"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:nan_alarm"})
        llm.generate("A hook sits")
        print(hooks.list()[0]["fired"])
        hooks.remove(added["id"])

    Args:
        llm: An ``LLM`` that was made with `engine_options`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def add(self, spec: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Attach one hook in all workers, or in none; return it with the modules that it is on.

        Raises:
            NoMatchError: No worker has such a module.
            OptionError: A factory or an option is wrong, or this engine has no way to fire hooks.
        """
        answers = self._call("hookline_add", [spec], None, strict)
        try:
            return merge_added(answers)[0]
        except Exception:
            for id in {hook["id"] for answer in answers for hook in answer.get("hooks", ())}:
                self._call("hookline_remove", id)
            raise

    def list(self) -> _Found:
        """Return the hooks, with what they have done in all workers together."""
        return merge_hooks(self._checked("hookline_list"))

    def remove(self, id: str) -> dict[str, Any]:
        """Remove a hook from all workers, and return its last figures."""
        return merge_removed(self._call("hookline_remove", id))

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id."""
        return merge_metrics(self._checked("hookline_metrics"))

    def states(self, key: str) -> RequestAnswer:
        """Return what a request that has ended asked for, merged over the workers, and forget it.

        Recipe::

            asked = {"hidden_states": {"layers": ["model.layers.#"], "window": [-4, None]}}
            done = llm.generate("A hook sits", SamplingParams(extra_args={"hookline": asked}))
            answer = hooks.states(done[0].request_id)
            print(answer.states["model.layers.1"].values.shape, answer.not_computed)

        Args:
            key: The id of the request, or the ``key`` that its options gave.

        Raises:
            HookNameError: It did not ask for anything, or that was taken before.
            OptionError: What it asked for cannot be had, or there are several answers under that key.
        """
        found = self.answers(key)
        if len(found) != 1:
            raise OptionError(f"{key!r} has {len(found)} answers; VllmHooks.answers returns all of them.")
        return found[0]

    def answers(self, key: str) -> Sequence[RequestAnswer]:
        """Return what all answers of the requests under a key asked for, in their order, and forget it."""
        return [RequestAnswer.of(each) for each in merge_results(self._call("hookline_take", key))]

    def flags(self, name: str) -> _Found:
        """Return what probes flagged in a request that did not ask for anything itself, and forget it."""
        try:
            return [flag for answer in self.answers(name) for flag in answer.flags]
        except HookNameError:
            return []

    def describe(self) -> _Found:
        """Return what each worker knows of the engine, and how many tokens came from the prefix cache."""
        return [answer["engine"] for answer in self._checked("hookline_describe")]

    def _call(self, method: str, *args: Any) -> _Found:
        found: _Found = self._llm.collective_rpc(method, args=args)
        return found

    def _checked(self, method: str, *args: Any) -> _Found:
        answers = self._call(method, *args)
        check_answers(answers)
        return answers
