"""Read what an engine was started with, and add hookline to engines that somebody else starts.

`HookExtension` reads `StartOptions` in each worker; users write them with `engine_options`, as ``--additional-config``,
or in the environment. `register` is an entry point of ``vllm.general_plugins``: vLLM calls it in each of its processes,
and without ``HOOKLINE_VLLM=1`` or ``HOOKLINE_VLLM_HOOKS=FILE`` in the environment it does nothing. Imports no torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from hookline.errors import OptionError
from hookline.messages import suggest

__all__ = ["EXTENSION", "TAP", "StartOptions", "combined_path", "engine_options", "register", "with_hooks"]

EXTENSION: Final = "hookline.engines.vllm.extension.HookExtension"
"""What ``--worker-extension-cls`` takes."""
_HOOKS: Final = "HOOKLINE_VLLM_HOOKS"
"""A file of hooks; the plugin adds the extension to every engine of the process."""
_ON: Final = "HOOKLINE_VLLM"
"""Set to 1, the plugin adds the extension without hooks."""
_KEY: Final = "hookline"
TAP: Final = "hookline_vllm::tap"
"""The operator of `Taps`, as ``splitting_ops`` of vLLM's compilation config takes it."""


@dataclass(frozen=True)
class StartOptions:
    """What an engine was started with; see `engine_options`."""

    hooks: str | None = None
    """A file of hooks."""
    taps: tuple[str, ...] = ()
    """Modules at which hooks fire in compiled code (`Taps`), by name or pattern. vLLM makes these part of the key of
    its compile cache, so that it never runs code with other taps."""
    captured_bytes: int = 1 << 30
    """How much hidden states of requests may take in each worker."""
    allow: tuple[str, ...] | None = None
    """What paths of factories may begin with that come over HTTP with the token; None allows
    ``hookline.factories``."""
    allow_requests: tuple[str, ...] | None = None
    """What paths of factories may begin with that requests bring, beside ``hookline.factories``."""
    export_dir: str | None = None
    """The folder for files of hooks that come over HTTP; without it such hooks get no files."""
    protect: str = "hooks"
    """Which of hookline's paths need the token: ``"hooks"``, those that change hooks, or ``"everything"``. Those of
    vLLM are protected by its own ``--api-key``."""

    def __post_init__(self) -> None:
        if self.hooks is not None and (not isinstance(self.hooks, str) or not self.hooks):
            raise OptionError(f"hooks is the path of a file of hooks, got {self.hooks!r}.")
        for name, example in (("allow", "my_project"), ("allow_requests", "my_project"), ("taps", "model.layers.#")):
            given = getattr(self, name)
            if given is not None:
                if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
                    raise OptionError(f"{name} is a list such as ['{example}'], got {given!r}.")
                object.__setattr__(self, name, tuple(given))
        if self.protect not in ("hooks", "everything"):
            raise OptionError(f"protect is 'hooks' or 'everything', got {self.protect!r}.")
        if type(self.captured_bytes) is not int or self.captured_bytes < 0:
            raise OptionError(f"captured_bytes is a whole number from 0 on, got {self.captured_bytes!r}.")

    @classmethod
    def read(cls, additional: Any, environment: Mapping[str, str] | None = None) -> StartOptions:
        """Return the options in ``additional``, the engine's ``additional_config``; then those of the environment."""
        given = additional.get(_KEY) if isinstance(additional, Mapping) else None
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise OptionError(
                f"additional_config has {_KEY!r}: {given!r}; it is an object such as {{'hooks': 'FILE'}}."
            )
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                raise OptionError(
                    f"additional_config: {_KEY} has no option {key!r}{suggest(str(key), known) or '.'} "
                    f"It takes {', '.join(known)}."
                )
        found = {key: value for key, value in given.items() if value is not None}
        from_environment = (os.environ if environment is None else environment).get(_HOOKS)
        if from_environment and "hooks" not in found:
            found["hooks"] = from_environment
        return cls(**found)


def engine_options(
    *,
    hooks: str | Path | None = None,
    taps: Sequence[str] = (),
    captured_bytes: int | None = None,
    combine_with: str | None = None,
) -> dict[str, Any]:
    """Return arguments of ``LLM(...)`` and ``AsyncEngineArgs(...)`` that put hookline into the workers.

    Recipe::

        llm = LLM("models/tiny", **engine_options(hooks="hooks.json"))

    Args:
        hooks: A file of hooks, as ``hookline serve --hooks`` takes it; attached on each worker when the model is ready.
        taps: Modules whose outputs hooks see in compiled code, such as ``["model.layers.#"]``: the steps of a compiled
            engine then stay compiled while hooks are on these alone. The graph is split there, and decodes are
            replayed as pieces instead of whole CUDA graphs.
        captured_bytes: How much hidden states of requests may take in each worker; 1 GiB if left out.
        combine_with: Another extension class, by its dotted path, such as TRL's: vLLM takes only one.
    """
    options: dict[str, Any] = {
        "hooks": None if hooks is None else str(Path(hooks).absolute()),
        "taps": (taps if isinstance(taps, str) else list(taps)) or None,
        "captured_bytes": captured_bytes,
    }
    given = {key: value for key, value in options.items() if value is not None}
    StartOptions(**given)  # raises before an engine is started
    return {
        "worker_extension_cls": EXTENSION if combine_with is None else combined_path(combine_with),
        "additional_config": {_KEY: given},
        **({"compilation_config": _split_at_taps()} if taps else {}),
    }


def _split_at_taps() -> dict[str, Any]:
    """Return a compilation config that splits the graph at taps too, and replays nothing but its pieces."""
    from vllm.config import CompilationConfig

    # vLLM's own list, which it makes only where none is given, and ours.
    updates = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
    return {"splitting_ops": [*CompilationConfig._attention_ops, *updates, TAP], "cudagraph_mode": "PIECEWISE"}


def combined_path(other: str) -> str:
    """Return the path of a class that is `HookExtension` and the class at the dotted path ``other`` in one."""
    if not other.rpartition(".")[0]:
        raise OptionError(f"An extension class has a dotted path such as 'package.module.Class', got {other!r}.")
    return f"hookline.engines.vllm.extension.{other.replace('.', '/')}"


def register() -> None:
    """Have every engine that this process configures use `HookExtension`, beside another extension if it has one."""
    is_on = os.environ.get(_ON, "").lower() not in ("", "0", "false", "no", "off")
    if not is_on and not os.environ.get(_HOOKS):
        return
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if arguments is None or hasattr(arguments.create_engine_config, "_hookline_wraps"):
        return  # a process of the engine: its configuration has been made
    original = arguments.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        parallel = config.parallel_config
        parallel.worker_extension_cls = with_hooks(parallel.worker_extension_cls)
        return config

    create_engine_config._hookline_wraps = original  # type: ignore[attr-defined]
    arguments.create_engine_config = create_engine_config


def with_hooks(extension: str | None) -> str:
    """Return the path of an extension class that has the methods of hookline, and those of ``extension``."""
    if not extension:
        return EXTENSION
    is_ours = extension.startswith("hookline.engines.vllm.")
    return extension if is_ours else combined_path(extension)
