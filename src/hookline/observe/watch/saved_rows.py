"""Save the rows of a statistics engine in a checkpoint, and load them again; `Watch` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hookline.observe.watch.stats_engine import StatsEngine

__all__ = ["load_rows", "saved_rows"]


def saved_rows(engine: StatsEngine) -> list[dict[str, Any]]:
    """Return the rows of each place, and what is kept per unit, for a checkpoint."""
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


def load_rows(engine: StatsEngine, saved: Iterable[Mapping[str, Any]]) -> None:
    """Go on from what `saved_rows` gave; rows of other statistics than are asked for now are passed over."""
    engine.reset()
    for state in saved:
        place = engine.place(state["name"], state["kind"])
        for device, values in state["rows"].items():
            row = engine.row(place, torch.device(device))
            count = row.added.numel()
            if values.numel() == count + row.kept.numel():
                row.added.copy_(values[:count])
                row.kept.copy_(values[count:])
        for one, kept in zip(place.beside, state["beside"], strict=False):
            one.kept = kept
