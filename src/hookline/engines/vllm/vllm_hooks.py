"""Attach, list and remove hooks in all workers of an ``LLM`` of vLLM, from the program that made it.

Users call `VllmHooks`. It calls the methods of `HookExtension` over ``collective_rpc``, and merges the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hookline.engines.hidden_states import StatesOfLayer
from hookline.engines.vllm.merge_answers import (
    check_answers,
    error_of,
    merge_added,
    merge_flags,
    merge_hooks,
    merge_metrics,
    merge_removed,
    merge_results,
)
from hookline.errors import OptionError

__all__ = ["RequestAnswer", "VllmHooks"]

_Found = list[dict[str, Any]]  # `VllmHooks` has a method of that name


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
        error = error_of([merged])
        if error is not None:
            raise error
        states = {
            name: StatesOfLayer(list(layer["positions"]), _tensor(layer)) for name, layer in merged["states"].items()
        }
        rest = ("prompt_tokens", "not_computed", "hooks", "flags", "silent")
        return cls(states, *(merged[name] for name in rest))

    def save(self, path: str | Path) -> None:
        """Write the states as a safetensors file: a tensor for each layer, and ``positions/LAYER``."""
        from safetensors.torch import save_file

        tensors = {name: layer.values.contiguous() for name, layer in self.states.items()}
        positions = {f"positions/{name}": torch.tensor(layer.positions) for name, layer in self.states.items()}
        counts = {"prompt_tokens": str(self.prompt_tokens), "not_computed": str(self.not_computed)}
        save_file({**tensors, **positions}, str(path), metadata=counts)


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
        return self.add_all([spec], strict=strict)[0]

    def add_all(self, specs: Sequence[Mapping[str, Any]], *, strict: bool = True) -> _Found:
        """Attach several hooks in all workers, or none of them."""
        answers = self._call("hookline_add", [*specs], None, strict)
        try:
            return merge_added(answers)
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
        return merge_flags([answer["flags"] for answer in self._checked("hookline_take_flags", name)])

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
