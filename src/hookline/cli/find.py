"""Show the modules of a model that a pattern matches: ``hookline find MODEL [PATTERN]``.

`main` calls `find`, which makes the model and prints the table of `hookline.find`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hookline.cli.main import DONE
from hookline.cli.models import model_at
from hookline.cli.screen import shell_text, tell, tell_json
from hookline.errors import NoMatchError
from hookline.runs.flags import Show, parse

if TYPE_CHECKING:
    from hookline.sites.find import Sites
    from hookline.sites.site_info import Site

__all__ = ["FindOptions", "find"]


@dataclass
class FindOptions:
    """Show the modules of a model that a pattern matches, with type, parameters and hooks.

    Examples:
      hookline find my_file.py:make_model
      hookline find my_file.py:MyModel 'layers.#.mlp'     # # is a number, * crosses dots
      hookline find mod_arithmetic '*.mlp.*'
      hookline find models/llama 'role:attn'              # a folder of transformers: its config.json is enough
    """

    model: Annotated[str, Show("FILE:MODEL", is_word=True)]
    """A model, its class, or a function that makes one: file.py:NAME or package.module:NAME; also an experiment, or the
    folder of a saved model."""
    pattern: Annotated[str, Show("[PATTERN]", is_word=True)] = "*"
    """Which modules; all if left out."""
    exclude: Annotated[str | None, Show("PATTERN")] = None
    """Which of these not."""
    json: bool = False
    """Print JSON."""


def find(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = parse(FindOptions, arguments, "find")
    from hookline.sites import find as sites

    model = model_at(options.model)
    try:
        found = sites.find(model, options.pattern, exclude=options.exclude)
    except NoMatchError as error:
        raise NoMatchError(shell_text(error, options.model)) from None
    if options.json:
        tell_json("find", {"modules": [_plain(found, site) for site in found]})
    else:
        tell(repr(found))
    return DONE


def _plain(found: Sites, site: Site) -> dict[str, Any]:
    return {"name": site.name, "type": site.type, "parameters": site.num_parameters, "hooks": found.hooks(site)}
