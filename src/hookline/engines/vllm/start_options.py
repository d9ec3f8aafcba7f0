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
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictInt, StrictStr, TypeAdapter
from pydantic.dataclasses import dataclass

from hookline.engines.request_options import CHECKED, checked, without_nulls
from hookline.errors import OptionError
from hookline.specs.hook_spec import option_errors

EXTENSION: Final = "hookline.engines.vllm.extension.HookExtension"
"""What ``--worker-extension-cls`` takes."""
_HOOKS: Final = "HOOKLINE_VLLM_HOOKS"
"""A file of hooks; the plugin adds the extension to every engine of the process."""
_ON: Final = "HOOKLINE_VLLM"
"""Set to 1, the plugin adds the extension without hooks."""
_KEY: Final = "hookline"
_WRAPS: Final = "_hookline_wraps"
"""The attribute of a function of ours in the place of one of vLLM's."""
TAP: Final = "hookline_vllm::tap"
"""The operator of `Taps`, as ``splitting_ops`` of vLLM's compilation config takes it."""


_Names = tuple[StrictStr, ...]


@checked
@dataclass(frozen=True, config=CHECKED)
class StartOptions:
    """What an engine was started with; see `engine_options`."""

    hooks: Annotated[StrictStr, Field(min_length=1)] | None = None
    """A file of hooks."""
    taps: _Names = ()
    """Modules at which hooks fire in compiled code (`Taps`), by name or pattern. vLLM makes these part of the key of
    its compile cache, so that it never runs code with other taps."""
    captured_bytes: Annotated[StrictInt, Field(ge=0)] = 1 << 30
    """How much hidden states of requests may take in each worker."""
    allow: _Names | None = None
    """What paths of factories may begin with that come over HTTP with the token; None allows
    ``hookline.factories``."""
    allow_requests: _Names | None = None
    """What paths of factories may begin with that requests bring, beside ``hookline.factories``."""
    export_dir: StrictStr | None = None
    """The folder for files of hooks that come over HTTP; without it such hooks get no files."""
    protect: Literal["hooks", "everything"] = "hooks"
    """Which of hookline's paths need the token: ``"hooks"``, those that change hooks, or ``"everything"``. Those of
    vLLM are protected by its own ``--api-key``."""

    @classmethod
    def read(cls, additional: Any) -> StartOptions:
        """Return the options in ``additional``, the engine's ``additional_config``; then those of the environment."""
        given = additional.get(_KEY) if isinstance(additional, Mapping) else None
        found = without_nulls({} if given is None else given)
        file = os.environ.get(_HOOKS)
        if file and isinstance(found, Mapping):
            found = {"hooks": file, **found}
        try:
            with option_errors(cls):
                return TypeAdapter(cls).validate_python(found)
        except OptionError as error:
            raise OptionError(f"additional_config: {_KEY}: {error}") from None


def engine_options(
    *, hooks: str | Path | None = None, taps: Sequence[str] = (), captured_bytes: int | None = None
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
    """
    options: dict[str, Any] = {
        "hooks": None if hooks is None else str(Path(hooks).absolute()),
        "taps": taps if isinstance(taps, str) else list(taps) or None,
        "captured_bytes": captured_bytes,
    }
    given = {key: value for key, value in options.items() if value is not None}
    StartOptions(**given)  # raises before an engine is started
    return {
        "worker_extension_cls": EXTENSION,
        "additional_config": {_KEY: given},
        **({"compilation_config": _split_at_taps()} if taps else {}),
    }


def _split_at_taps() -> dict[str, Any]:
    """Return a compilation config that splits the graph at taps too, and replays nothing but its pieces."""
    from vllm.config import CompilationConfig

    # vLLM's own list, which it makes only where none is given, and ours.
    updates = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
    return {"splitting_ops": [*CompilationConfig._attention_ops, *updates, TAP], "cudagraph_mode": "PIECEWISE"}


def register() -> None:
    """Have every engine that this process configures use `HookExtension`; raise where it has another extension."""
    is_on = os.environ.get(_ON, "").lower() not in ("", "0", "false", "no", "off")
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if arguments is not None and (is_on or os.environ.get(_HOOKS)):  # a process of the engine has no such module
        wrap(arguments, "create_engine_config", after=_add_extension)


def _add_extension(config: Any, *args: Any, **kwargs: Any) -> None:
    parallel = config.parallel_config
    other = parallel.worker_extension_cls
    if other and other != EXTENSION:
        raise OptionError(
            f"vLLM takes one worker extension, and this engine has {other}. Derive a class from that and from "
            f"{EXTENSION}, name it as worker_extension_cls, and unset {_ON} and {_HOOKS}."
        )
    parallel.worker_extension_cls = EXTENSION


def wrap(owner: Any, name: str, *, before: Any = None, after: Any = None) -> None:
    """Have a function of vLLM call ``before`` with its arguments, and ``after`` with its result and these; once only.

    What they raise goes to the caller of the function.
    """
    original = getattr(owner, name)
    if hasattr(original, _WRAPS):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    setattr(call, _WRAPS, True)
    setattr(owner, name, call)
