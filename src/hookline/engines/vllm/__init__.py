"""Hooks in vLLM's workers: specs at the start and at run time, and hidden states of single requests.

Recipe::

    from vllm import LLM
    from hookline.engines.vllm import VllmHooks, engine_options

    llm = LLM("models/tiny", enforce_eager=True, **engine_options(hooks="hooks.json"))
    hooks = VllmHooks(llm)
    added = hooks.add({"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"})
    llm.generate("A hook sits")
    print(hooks.list(), hooks.metrics())
    hooks.remove(added["id"])

Names are imported when first used; none of them imports vllm before an engine does.
"""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
