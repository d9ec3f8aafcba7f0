"""Attach, list and remove hooks in all workers of an ``LLM`` of vLLM, from the program that made it.

Users call `VllmHooks`. It calls the methods of `HookExtension` over ``collective_rpc``, and merges the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.engines.vllm.merge_answers import check_answers, merge_added, merge_hook, merge_hooks, merge_metrics
from hookline.engines.vllm.merge_states import RequestAnswer, merge_states, merge_worker_flags, request_answer

__all__ = ["VllmHooks"]

_Found = list[dict[str, Any]]  # `VllmHooks` has a method of that name


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
        """Remove a hook from all workers; one in compiled code is switched off for good. Return its last figures."""
        answers = self._call("hookline_remove", id)
        found = [answer["hook"] for answer in answers if answer.get("error") is None]
        if not found:
            check_answers(answers)
        return merge_hook(found, [int(answer["rank"]) for answer in answers])

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id."""
        return merge_metrics(self._checked("hookline_metrics"))

    def states(self, key: str) -> RequestAnswer:
        """Return the hidden states of a request that has ended, merged over the workers, and forget them.

        Recipe::

            asked = {"hidden_states": {"layers": ["model.layers.#"], "window": [-4, None]}}
            done = llm.generate("A hook sits", SamplingParams(extra_args={"hookline": asked}))
            answer = hooks.states(done[0].request_id)
            print(answer.states["model.layers.1"].values.shape, answer.not_computed)

        Args:
            key: The id of the request, or the ``key`` that its options gave.

        Raises:
            HookNameError: It did not ask for any, or they were taken before.
            OptionError: What it asked for cannot be had.
        """
        return request_answer(merge_states(self._call("hookline_take_states", key)))

    def flags(self, key: str) -> _Found:
        """Return what probes flagged in a request that did not ask for anything itself, and forget it."""
        return merge_worker_flags(self._checked("hookline_take_flags", key))

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
