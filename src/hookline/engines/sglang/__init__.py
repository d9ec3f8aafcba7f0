"""Hooks in SGLang's model runners: specs of a file at the start, for one request or for all.

Recipe::

    HOOKLINE_SGLANG_HOOKS=hooks.json python -m sglang.launch_server --model-path models/llama

Tested against the modules of SGLang 0.5.23 on a CPU, without its kernels; a whole engine, CUDA graphs and several
ranks are untested: read from the sources. Names are imported when first used; none of them imports sglang.
"""

from __future__ import annotations

import os

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)


def register() -> None:
    """Have SGLang attach the hooks of ``HOOKLINE_SGLANG_HOOKS`` to every model that this process loads.

    An entry point of ``sglang.srt.plugins``: SGLang calls it in each of its processes. Without that variable it does
    nothing and imports nothing.
    """
    if os.environ.get("HOOKLINE_SGLANG_HOOKS"):
        from hookline.engines.sglang.runner_hooks import install

        install(os.environ["HOOKLINE_SGLANG_HOOKS"], os.environ.get("HOOKLINE_SGLANG_REPORT"))
