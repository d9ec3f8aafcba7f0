"""What a metric means, for whoever lists or draws it.

Given by a hook's ``describe_metrics``, asked for through ``HookRegistry.describe``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MetricInfo"]


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric of a hook, in words.

    Recipe: ``MetricInfo("total_norm", "length of the whole gradient", formula="‖g‖")`` in ``describe_metrics``.
    """

    name: str
    """As the hook returns it, without the hook's name."""
    description: str = ""
    """What it measures."""
    formula: str = ""
    """How it is computed."""
    sign_info: str = ""
    """What a high, low or negative value says."""
    label: str = ""
    """What to write beside a curve of it."""
    keys: str = ""
    """What the keys stand for, if the metric is a dictionary with numbers for keys: ``frequency``, ``class``."""
