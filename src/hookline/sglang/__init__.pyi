"""The public names of ``hookline.sglang``, each with the module it lives in."""

from hookline.sglang.general_dumper import Dumper as Dumper
from hookline.sglang.general_dumper import DumperConfig as DumperConfig
from hookline.sglang.general_dumper import dumper as dumper
from hookline.sglang.model_runner import ModelRunner as ModelRunner
from hookline.sglang.server_args import ServerArgs as ServerArgs
from hookline.sglang.tensor_dumper import TensorDumper as TensorDumper
from hookline.sglang.tensor_dumper import register_forward_hook_for_model as register_forward_hook_for_model

__all__: list[str]
