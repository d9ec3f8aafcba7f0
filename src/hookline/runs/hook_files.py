"""Read a file of hooks for a served model: a list of specs, or an object that has one and may switch it off.

``hookline serve --hooks`` and the engines call `specs_of_file`; it checks every spec and names the lines of mistakes.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from hookline.errors import ConfigError

__all__ = ["NO_HOOKS", "specs_of_file"]

logger = logging.getLogger("hookline.serve")

NO_HOOKS: Final = "enable_hooks=True but no 'hooks' specified in server_args"


def specs_of_file(path: str) -> list[Any]:
    """Return the specs of the file at ``path``; log if it has none."""
    from hookline.runs.read import read_document
    from hookline.runs.run_file import placed_specs
    from hookline.runs.spec_files import server_settings

    document = read_document(path)
    values = document.values
    if values is None:
        raise ConfigError(f"{path} is empty; a file of hooks is a list of specs.")
    if isinstance(values, dict) and isinstance(values.get("hooks"), dict):
        server_settings(document)  # says that hooks are a list; placed_specs would take it for a run file
    specs = [spec for _, spec in placed_specs(document)]
    if isinstance(values, dict) and values.get("enable_hooks") and not values.get("hooks"):
        logger.warning(NO_HOOKS)
    elif not specs:
        logger.warning("%s has no hooks that are switched on; nothing is attached from it", path)
    return specs
