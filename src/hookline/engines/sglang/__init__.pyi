"""The public names of ``hookline.engines.sglang``, each with the module it lives in."""

from hookline.engines.sglang.runner_hooks import SglangHooks as SglangHooks
from hookline.engines.sglang.runner_hooks import hooks_of_runner as hooks_of_runner

__all__: list[str]
