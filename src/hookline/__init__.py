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
    from hookline.errors import TargetError as TargetError
    from hookline.errors import UnhookableError as UnhookableError
    from hookline.sites.attach import attach as attach
    from hookline.sites.everywhere import attach_everywhere as attach_everywhere
    from hookline.sites.find import Sites as Sites
    from hookline.sites.find import assert_no_hooks as assert_no_hooks
    from hookline.sites.find import attached as attached
    from hookline.sites.find import find as find
    from hookline.sites.handle import HandleSet as HandleSet
    from hookline.sites.handle import HookHandle as HookHandle
    from hookline.sites.kinds import Kind as Kind
    from hookline.sites.parameters import clip_gradients as clip_gradients
    from hookline.sites.parameters import freeze as freeze
    from hookline.sites.receipt import Receipt as Receipt
    from hookline.sites.site import Site as Site
    from hookline.types import ModulePostHook as ModulePostHook
    from hookline.types import ModulePreHook as ModulePreHook

__version__ = "0.1.0"

_HOME = {
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
    "OptionError": "errors",
    "Receipt": "sites.receipt",
    "Site": "sites.site",
    "Sites": "sites.find",
    "TargetError": "errors",
    "UnhookableError": "errors",
    "assert_no_hooks": "sites.find",
    "attach": "sites.attach",
    "attach_everywhere": "sites.everywhere",
    "attached": "sites.find",
    "clip_gradients": "sites.parameters",
    "find": "sites.find",
    "freeze": "sites.parameters",
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
