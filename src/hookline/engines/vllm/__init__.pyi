"""The public names of ``hookline.engines.vllm``, each with the module it lives in."""

from hookline.engines.vllm.extension import HookExtension as HookExtension
from hookline.engines.vllm.start_options import engine_options as engine_options
from hookline.engines.vllm.vllm_hooks import RequestAnswer as RequestAnswer
from hookline.engines.vllm.vllm_hooks import VllmHooks as VllmHooks
from hookline.engines.vllm.vllm_hooks import merge_hooks as merge_hooks
from hookline.engines.vllm.vllm_hooks import merge_metrics as merge_metrics
from hookline.engines.vllm.vllm_hooks import merge_results as merge_results

__all__: list[str]
