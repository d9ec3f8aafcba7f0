"""The public names of ``hookline.sglang``, each with the module it lives in."""

from hookline.sglang.model_runner import ModelRunner as ModelRunner
from hookline.sglang.server_args import ServerArgs as ServerArgs

__all__: list[str]
