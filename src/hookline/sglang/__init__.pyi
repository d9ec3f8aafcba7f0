"""The public names of ``hookline.sglang``, each with the module it lives in."""

from hookline.sglang.dumpers import Dumper as Dumper
from hookline.sglang.dumpers import DumperConfig as DumperConfig
from hookline.sglang.dumpers import TensorDumper as TensorDumper
from hookline.sglang.dumpers import dumper as dumper
from hookline.sglang.dumpers import register_forward_hook_for_model as register_forward_hook_for_model
from hookline.sglang.model_runner import ModelRunner as ModelRunner
from hookline.sglang.server_args import ServerArgs as ServerArgs

__all__: list[str]
