"""Put hooks on the models of SGLang's engines that somebody else starts; an entry point of ``sglang.srt.plugins``.

SGLang calls `register` in each of its processes. Without ``HOOKLINE_SGLANG_HOOKS=FILE`` in the environment it does
nothing and imports nothing.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Register with SGLang what attaches the hooks of the file to every model that this process loads."""
    if not os.environ.get("HOOKLINE_SGLANG_HOOKS"):
        return
    from hookline.engines.sglang.runner_patches import install
    from hookline.engines.sglang.sglang_options import SglangOptions

    install(SglangOptions.read(os.environ))
