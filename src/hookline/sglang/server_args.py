"""Hold the settings of a server: which hooks it attaches, and everything else as it is.

Made by hand or from a file; `ModelRunner` and ``hookline serve`` take the specs from it. Imports neither torch nor the
packages of ``hookline[serve]``.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

from hookline.errors import OptionError
from hookline.messages import suggest, type_name
from hookline.plain import own_copy

if TYPE_CHECKING:
    from hookline.specs.hook_spec import HookSpec

logger = logging.getLogger(__name__)

ABOUT_HOOKS: Final = ("enable_hooks", "hooks", "forward_hooks")
"""The settings that are hookline's."""


class ServerArgs(SimpleNamespace):
    """Hold the settings of a server: its hooks on modules, and all others.

    Recipe::

        args = hookline.sglang.ServerArgs(
            enable_hooks=True,
            hooks=[
                {
                    "name": "outer_linear_hooks",
                    "target_modules": ["outer.0", "outer.1"],
                    "hook_factory": "my_project.hooks:dummy_hook_factory",
                    "config": {"tag": "outer-layer"},
                }
            ],
            model_path="models/small",  # not about hooks: args.model_path
        )
        runner = hookline.sglang.ModelRunner(model, args)
        runner.initialize()

    Args:
        enable_hooks: Whether ``hooks`` are attached.
        hooks: Hook specs: objects, of which copies are kept, or `HookSpec`.
        forward_hooks: The same by its newer name, which needs no switch: a list that has something in it is attached.
        others: Any other settings; kept as attributes.
    """

    enable_hooks: bool
    hooks: list[Any] | None
    forward_hooks: list[Any] | None

    def __init__(
        self,
        *,
        enable_hooks: bool = False,
        hooks: Iterable[HookSpec | Mapping[str, Any]] | None = None,
        forward_hooks: Iterable[HookSpec | Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> None:
        if not isinstance(enable_hooks, bool):  # "false" is true to Python
            raise OptionError(f"enable_hooks is true or false, got {enable_hooks!r}.")
        given = {"hooks": _listed("hooks", hooks), "forward_hooks": _listed("forward_hooks", forward_hooks)}
        super().__init__(enable_hooks=enable_hooks, **given, **others)
        for key in others:
            if meant := suggest(key, ABOUT_HOOKS, cutoff=0.85):
                logger.warning("server_args has %r, which is not about hooks%s", key, meant)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings in a JSON object; keys that are not about hooks are kept."""
        if not isinstance(values, Mapping):
            raise OptionError(f"The settings of a server are an object with keys, got {type_name(values)}.")
        return cls(**{str(key): value for key, value in values.items()})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read them from JSON (comments allowed), YAML or TOML; an error about a spec has its path and line."""
        from hookline.runs.documents import read_document, server_settings

        return cls.from_dict(server_settings(read_document(path)))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the flags of these settings to `parser`: ``--forward-hooks``, ``--enable-hooks``, ``--hooks``, ….

        Recipe::

            parser = argparse.ArgumentParser()
            hookline.sglang.ServerArgs.add_cli_args(parser)
            args = hookline.sglang.ServerArgs.from_cli_args(parser.parse_args())

        Hook specs are given as a JSON list. ``--model-path`` is kept, and not about hooks.
        """
        parser.add_argument("--model-path", "--model", metavar="PATH", help="The model; kept as model_path.")
        parser.add_argument("--enable-hooks", action="store_true", default=False, help="Attach what --hooks says.")
        for flag, needs in (("--hooks", "; attached if --enable-hooks is given"), ("--forward-hooks", "")):
            about = f"Hook specs (name, target_modules, hook_factory, config, …) as a JSON list{needs}."
            parser.add_argument(flag, type=_json_list, default=None, metavar="JSON", help=about)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make settings of parsed flags; those that other code has added to the parser are kept, unless None."""
        return cls(**{name: value for name, value in vars(args).items() if value is not None})

    def hook_specs(self) -> list[HookSpec | Mapping[str, Any]]:
        """Return copies of what is to be attached: ``hooks`` if they are enabled, then ``forward_hooks``."""
        return own_copy([*((self.hooks or ()) if self.enable_hooks else ()), *(self.forward_hooks or ())])


def _listed(name: str, value: Any) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise OptionError(f"{name} is a list of hook specs, got {type_name(value)}; write [spec].")
    return own_copy(list(value))


def _json_list(text: str) -> list[Any]:
    """Return the list that `text` says in JSON; argparse prints the error."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise argparse.ArgumentTypeError(f"Invalid JSON list: {text}. Please provide a valid JSON list.")
    return value
