"""Print JSON for programs: what ``--json`` of a command gives.

The commands call `tell_json`. Keys may be added; the ``"version"`` goes up when one is taken away.
"""

from __future__ import annotations

import json
from typing import Any, Final

from hookline.cli.screen import tell

__all__ = ["tell_json"]

VERSION: Final = 1
"""Goes up when a key is renamed, taken away, or means something else."""


def tell_json(command: str, values: dict[str, Any]) -> None:
    """Print ``values`` as the JSON of ``command``, with format and version before them."""
    found = {"format": f"hookline.{command}", "version": VERSION, **values}
    tell(json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False))
