"""hookline: one hook system for PyTorch.

Recipe::

    import hookline as hl

    with hl.attach(model, "layers.#", lambda module, args, output: print(output.shape)) as handle:
        model(x)
    print(handle.report())

Names are imported when first used, so ``import hookline`` costs next to nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.errors import HooklineError as HooklineError
    from hookline.errors import HooklineWarning as HooklineWarning
    from hookline.errors import HookNeverFired as HookNeverFired
    from hookline.errors import HookReturnError as HookReturnError
    from hookline.errors import HookSignatureError as HookSignatureError
    from hookline.errors import HooksLeftError as HooksLeftError
    from hookline.errors import KindError as KindError
    from hookline.errors import NoMatchError as NoMatchError
    from hookline.errors import OptionError as OptionError
    from hookline.errors import ScopeError as ScopeError
    from hookline.errors import TargetError as TargetError
    from hookline.errors import UnhookableError as UnhookableError
    from hookline.observe.profile import Profile as Profile
    from hookline.observe.profile import ProfileRow as ProfileRow
    from hookline.observe.profile import profile as profile
    from hookline.sites.attach import attach as attach
    from hookline.sites.bounds import clip_gradients as clip_gradients
    from hookline.sites.bounds import freeze as freeze
    from hookline.sites.everywhere import attach_everywhere as attach_everywhere
    from hookline.sites.find import Sites as Sites
    from hookline.sites.find import assert_no_hooks as assert_no_hooks
    from hookline.sites.find import attached as attached
    from hookline.sites.find import find as find
    from hookline.sites.functions.attach import attach_function as attach_function
    from hookline.sites.functions.site import FunctionSite as FunctionSite
    from hookline.sites.handle import HandleSet as HandleSet
    from hookline.sites.handle import HookHandle as HookHandle
    from hookline.sites.kinds import Kind as Kind
    from hookline.sites.nodes import attach_node as attach_node
    from hookline.sites.optimizers import OptimizerSite as OptimizerSite
    from hookline.sites.optimizers import attach_optimizer as attach_optimizer
    from hookline.sites.receipt import Receipt as Receipt
    from hookline.sites.saved import SavedTensors as SavedTensors
    from hookline.sites.saved import saved_tensors as saved_tensors
    from hookline.sites.site import Site as Site
    from hookline.sites.tensors import attach_tensor as attach_tensor
    from hookline.types import FunctionPostHook as FunctionPostHook
    from hookline.types import FunctionPreHook as FunctionPreHook
    from hookline.types import ModulePostHook as ModulePostHook
    from hookline.types import ModulePreHook as ModulePreHook

__version__ = "0.1.0"

_HOME = {
    "FunctionPostHook": "types",
    "FunctionPreHook": "types",
    "FunctionSite": "sites.functions.site",
    "HandleSet": "sites.handle",
    "HookHandle": "sites.handle",
    "HookNeverFired": "errors",
    "HookReturnError": "errors",
    "HookSignatureError": "errors",
    "HooklineError": "errors",
    "HooklineWarning": "errors",
    "HooksLeftError": "errors",
    "Kind": "sites.kinds",
    "KindError": "errors",
    "ModulePostHook": "types",
    "ModulePreHook": "types",
    "NoMatchError": "errors",
    "OptimizerSite": "sites.optimizers",
    "OptionError": "errors",
    "Profile": "observe.profile",
    "ProfileRow": "observe.profile",
    "Receipt": "sites.receipt",
    "SavedTensors": "sites.saved",
    "ScopeError": "errors",
    "Site": "sites.site",
    "Sites": "sites.find",
    "TargetError": "errors",
    "UnhookableError": "errors",
    "assert_no_hooks": "sites.find",
    "attach": "sites.attach",
    "attach_everywhere": "sites.everywhere",
    "attach_function": "sites.functions.attach",
    "attach_node": "sites.nodes",
    "attach_optimizer": "sites.optimizers",
    "attach_tensor": "sites.tensors",
    "attached": "sites.find",
    "clip_gradients": "sites.bounds",
    "find": "sites.find",
    "freeze": "sites.bounds",
    "profile": "observe.profile",
    "saved_tensors": "sites.saved",
}
"""Where each public name lives."""

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hookline.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
