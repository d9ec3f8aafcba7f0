"""What an engine has counted, as plain values for a checkpoint, and back.

Takes the engine of a `Watch`; rows stay where they are in memory, since graphs write to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hookline.observe.watch.stats_engine import Engine

__all__ = ["counted", "load_counted"]


def counted(engine: Engine) -> list[dict[str, Any]]:
    """For each place its rows, and what is kept per unit."""
    engine.flush()
    return [
        {
            "name": place.name,
            "kind": place.kind,
            "rows": {str(device): torch.cat([row.added, row.kept]) for device, row in place.rows.items()},
            "beside": [None if one.kept is None else one.kept.clone() for one in place.beside],
        }
        for place in engine.places.values()
    ]


def load_counted(engine: Engine, saved: list[Mapping[str, Any]]) -> None:
    """Go on from what `counted` gave; rows of other statistics than are asked for now are passed over."""
    engine.reset()
    for about in saved:
        place = engine.place(about["name"], about["kind"])
        for device, values in about["rows"].items():
            row = engine.row(place, torch.device(device))
            count = row.added.numel()
            if values.numel() == count + row.kept.numel():
                row.added.copy_(values[:count])
                row.kept.copy_(values[count:])
        for one, kept in zip(place.beside, about["beside"], strict=False):
            one.kept = kept
