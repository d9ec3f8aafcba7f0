"""The public names of ``hookline.sites``, each with the module it lives in."""

from hookline.sites.find import Sites as Sites
from hookline.sites.handle import HandleSet as HandleSet
from hookline.sites.handle import HookHandle as HookHandle
from hookline.sites.hook_at_site import FunctionSite as FunctionSite
from hookline.sites.hook_at_site import OptimizerSite as OptimizerSite
from hookline.sites.hook_at_site import Site as Site
from hookline.sites.kinds import Kind as Kind
from hookline.sites.receipt import Receipt as Receipt
from hookline.sites.roles import find_roles as find_roles
from hookline.sites.tensors import SavedTensors as SavedTensors

__all__: list[str]
