"""The kinds of hook a module can carry, and which options each one takes.

Takes the ``on=`` of the public calls, hands a `Kind` to every other file of this folder.

    >>> Kind.parse("forward_post")
    <Kind.FORWARD: 'forward'>
"""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Final

from hookline.errors import KindError, OptionError

__all__ = ["Kind"]


class Kind(StrEnum):
    """When a module hook fires and what it is handed.

    One call of a module, top to bottom, with the hooks of each kind where they fire:

        module(*args)
        │  FORWARD_PRE       (module, args)                        may return new args
        ├─ forward()
        │  FORWARD           (module, args, output)                may return a new output
        └─ output
        output.backward()
        │  BACKWARD_PRE      (module, grad_output)                 may return new gradients
        ├─ the module's own backward
        │  BACKWARD          (module, grad_input, grad_output)     may return new gradients
        └─ on to the producer of the input
    """

    FORWARD_PRE = "forward_pre"
    """Before ``forward``: ``(module, args)``; with ``with_kwargs``: ``(module, args, kwargs)``."""
    FORWARD = "forward"
    """After ``forward``: ``(module, args, output)``; with ``with_kwargs``: ``(module, args, kwargs, output)``."""
    BACKWARD_PRE = "backward_pre"
    """When the gradients of the outputs are there: ``(module, grad_output)``."""
    BACKWARD = "backward"
    """When the gradients of inputs and parameters are there too: ``(module, grad_input, grad_output)``."""
    FULL_BACKWARD = "full_backward"
    """torch's own ``register_full_backward_hook``, with torch's own side effects (see docs/sources.md)."""
    STATE_DICT_PRE = "state_dict_pre"
    """Before ``state_dict()`` reads the module: ``(module, prefix, keep_vars)``."""
    STATE_DICT_POST = "state_dict_post"
    """After it: ``(module, state_dict, prefix, local_metadata)``."""
    LOAD_STATE_DICT_PRE = "load_state_dict_pre"
    """Before loading: ``(module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors)``."""
    LOAD_STATE_DICT_POST = "load_state_dict_post"
    """After loading: ``(module, incompatible_keys)``."""

    @classmethod
    def parse(cls, value: str | Kind) -> Kind:
        """The kind of that name or alias; a `KindError` with suggestions for anything else."""
        text = str(value) if isinstance(value, str) else repr(value)
        if text in _LEGACY:
            raise KindError(
                f"on={text!r} is torch's deprecated backward hook, which reports the gradients of the last "
                "operation instead of the module's; use on='backward'."
            )
        try:
            return cls(_ALIASES.get(text, text))
        except ValueError:
            near = difflib.get_close_matches(text, [*cls, *_ALIASES], n=3, cutoff=0.5)
            hint = f" Nearest: {', '.join(map(repr, map(str, near)))}." if near else ""
            raise KindError(f"No kind {text!r}.{hint} Kinds: {', '.join(cls)}.") from None

    @property
    def args(self) -> tuple[str, ...]:
        """Names of the positional arguments that a hook of this kind is called with."""
        return _ARGS[self]

    @property
    def edits(self) -> bool:
        """Whether a hook's return value replaces what it was shown."""
        return self in _EDITING

    @property
    def is_gradient(self) -> bool:
        """Whether it is built on our own gradient observation."""
        return self in (Kind.BACKWARD_PRE, Kind.BACKWARD)

    @property
    def is_state(self) -> bool:
        """Whether it fires on saving or loading rather than in a run of the model."""
        return self in _STATE

    def check_options(self, **given: bool) -> None:
        """Raise an `OptionError` for the first option that is switched on and does not go with this kind."""
        for option, on in given.items():
            takers = _TAKERS.get(option)
            if on and takers is not None and self not in takers:
                raise OptionError(
                    f"{option}= does not go with on={self.value!r}; it goes with {', '.join(sorted(takers))}."
                )


_EDITING: Final = frozenset({Kind.FORWARD_PRE, Kind.FORWARD, Kind.BACKWARD_PRE, Kind.BACKWARD, Kind.FULL_BACKWARD})
_STATE: Final = frozenset(
    {Kind.STATE_DICT_PRE, Kind.STATE_DICT_POST, Kind.LOAD_STATE_DICT_PRE, Kind.LOAD_STATE_DICT_POST}
)
_TAKERS: Final[dict[str, frozenset[Kind]]] = {
    "with_kwargs": frozenset({Kind.FORWARD_PRE, Kind.FORWARD}),
    "always_call": frozenset({Kind.FORWARD}),
    "observe": _EDITING,
}
_ALIASES: Final = {"forward_post": "forward", "backward_post": "backward"}
_LEGACY: Final = frozenset(
    {"legacy_backward", "backward_hook", "register_backward_hook", "non_full_backward", "backward_legacy"}
)
_ARGS: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.FORWARD_PRE: ("module", "args"),
    Kind.FORWARD: ("module", "args", "output"),
    Kind.BACKWARD_PRE: ("module", "grad_output"),
    Kind.BACKWARD: ("module", "grad_input", "grad_output"),
    Kind.FULL_BACKWARD: ("module", "grad_input", "grad_output"),
    Kind.STATE_DICT_PRE: ("module", "prefix", "keep_vars"),
    Kind.STATE_DICT_POST: ("module", "state_dict", "prefix", "local_metadata"),
    Kind.LOAD_STATE_DICT_PRE: (
        "module",
        "state_dict",
        "prefix",
        "local_metadata",
        "strict",
        "missing_keys",
        "unexpected_keys",
        "error_msgs",
    ),
    Kind.LOAD_STATE_DICT_POST: ("module", "incompatible_keys"),
}
