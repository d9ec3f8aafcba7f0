"""Attach, list and remove hooks in all workers of an ``LLM`` of vLLM, from the program that made it.

Users call `VllmHooks`. It calls the methods of `HookExtension` over ``collective_rpc``. Each worker answers ``{"rank":
0, …}``, or ``{"rank": 0, "error": {"type", "message"}}``; the functions below make one answer of all, here and for the
HTTP routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hookline import errors
from hookline.engines.hidden_states import StatesOfLayer
from hookline.errors import HooklineError, OptionError

_Found = list[dict[str, Any]]  # `VllmHooks` has a method of that name
_Answer = Mapping[str, Any]


def check_answers(answers: Sequence[_Answer]) -> None:
    """Raise the first error of the workers, as the class it had there if hookline has it."""
    error = next((answer["error"] for answer in answers if answer.get("error") is not None), None)
    if error is not None:
        name, text = str(error["type"]), str(error["message"])
        kind: Any = getattr(errors, name, None)
        is_ours = isinstance(kind, type) and issubclass(kind, HooklineError)
        raise kind(text) if is_ours else OptionError(f"{name}: {text}")


def merge_hooks(answers: Sequence[_Answer]) -> _Found:
    """Return the hooks of all workers, one entry for each id, in the order of their numbers; raise what went wrong.

    Where one worker alone has failed to attach a hook, its error is raised: the caller removes it from the others.
    """
    check_answers(answers)
    by_id: dict[str, list[_Answer]] = {}
    for answer in answers:
        for hook in answer["hooks"]:
            by_id.setdefault(hook["id"], []).append(hook)
    return [_merge_hook(by_id[id]) for id in sorted(by_id, key=lambda each: int(each[1:]))]


def _merge_hook(hooks: Sequence[_Answer]) -> dict[str, Any]:
    """Return one hook as all workers see it.

    A module counts the least of their firings: a worker that misses one is not hidden by the others.
    """
    sites: dict[str, int] = {}
    for hook in hooks:
        for name, fired in hook["sites"].items():
            sites[name] = min(fired, sites.get(name, fired))
    costs = [hook["cost_us"] for hook in hooks if hook["cost_us"] is not None]
    return {
        **{key: value for key, value in hooks[0].items() if key != "rank"},
        "fired": sum(sites.values()),
        "fired_by_rank": {str(hook["rank"]): sum(hook["sites"].values()) for hook in hooks},
        "cost_us": max(costs, default=None),
        "errors": sum(hook["errors"] for hook in hooks),
        "off": any(hook["off"] for hook in hooks),
        "last_error": _last_error(hooks),
        "sites": sites,
        "silent": {name: cause for hook in hooks for name, cause in hook["silent"].items()},
    }


def _last_error(hooks: Sequence[_Answer]) -> str | None:
    return next((hook["last_error"] for hook in hooks if hook["last_error"]), None)


def merge_metrics(answers: Sequence[_Answer]) -> dict[str, dict[str, float]]:
    """Return the metrics of each hook: those of the first rank, others under ``rank1/…`` where they differ."""
    check_answers(answers)
    merged: dict[str, dict[str, float]] = {}
    for answer in answers:
        for id, metrics in answer["metrics"].items():
            known = merged.setdefault(id, {})
            for name, value in metrics.items():
                if known.setdefault(name, value) != value:
                    known[f"rank{answer['rank']}/{name}"] = value
    return merged


def merge_results(answers: Sequence[_Answer]) -> _Found:
    """Return what the requests under one key asked for, one entry for each, as all workers have it.

    An entry has ``request``, ``states`` (``{"dtype", "shape", "positions", "data"}`` for each layer, with bytes as
    data), ``silent``, ``hooks``, ``flags``, ``prompt_tokens``, ``not_computed``, and ``error``: None, or ``{"type",
    "message"}``. Workers see the same tokens: figures are those of the first, errors those of all.

    Raises:
        HookNameError: Nothing is kept for that key.
    """
    check_answers(answers)
    merged = []
    for entries in zip(*(answer["answers"] for answer in answers), strict=True):
        hooks = [
            {**same[0], "errors": sum(hook["errors"] for hook in same), "last_error": _last_error(same)}
            for same in zip(*(entry["hooks"] for entry in entries), strict=False)
        ]
        error = next((entry["error"] for entry in entries if entry["error"] is not None), None)
        merged.append({**entries[0], "error": error, "hooks": hooks})
    return merged


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
            NoMatchError: There is no such module.
            OptionError: A factory or an option is wrong, or this engine has no way to fire hooks.
        """
        answers = self._call("hookline_add", [spec], None, strict)
        try:
            return merge_hooks(answers)[0]
        except Exception:
            for id in {hook["id"] for answer in answers for hook in answer.get("hooks", ())}:
                self._call("hookline_remove", id)
            raise

    def list(self) -> _Found:
        """Return the hooks, with what they have done in all workers together."""
        return merge_hooks(self._call("hookline_list"))

    def remove(self, id: str) -> dict[str, Any]:
        """Remove a hook from all workers, and return its last figures."""
        return merge_hooks(self._call("hookline_remove", id))[0]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id."""
        return merge_metrics(self._call("hookline_metrics"))

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

    def describe(self) -> _Found:
        """Return what each worker knows of the engine, and how many tokens came from the prefix cache."""
        answers = self._call("hookline_describe")
        check_answers(answers)
        return [answer["engine"] for answer in answers]

    def _call(self, method: str, *args: Any) -> _Found:
        found: _Found = self._llm.collective_rpc(method, args=args)
        return found
