"""The registry of hooks with the built-in ones in it, each by the path to its class.

What lies below (``hooks``) knows of no analysis; what lies above takes `HookRegistry` from here.
"""

from __future__ import annotations

from hookline.analyses import register_built_ins
from hookline.hooks.registry import HookRegistry

__all__ = ["HookRegistry"]

register_built_ins()
