"""Let a hook that is on many modules know at each firing which one it is, without asking.

A factory hook derives from `PerSiteHook`; ``attach`` asks it once for each module. Making a `Site` at every firing, and
finding the state of the module by its name, takes longer than keeping a small tensor does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.compiled.op_schemas import Summary

__all__ = ["PerSiteHook"]


class PerSiteHook(ABC):
    """A forward observer with a function for each site."""

    summary: Summary | None = None
    """What compiled code hands the outputs over to, instead of calling the hook for each module."""

    @property
    def is_per_site(self) -> bool:
        """Whether it is to be used so; otherwise it is called as any other hook is."""
        return True

    @abstractmethod
    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what is called with module, arguments and output at the site called ``name``."""
