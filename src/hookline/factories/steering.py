"""``steer``: add a vector to the outputs of modules.

Specs and users make it, with a vector from a config or a safetensors file. The arithmetic and its errors are those of
`hookline.edits.steer`. In a served batch it may be for some requests, which `served_batch` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.batch_rows import current_batch
from hookline.factories.factory_hook import FactoryHook, checked_options, choice, number, text, tried_by
from hookline.factories.served_batch import (
    STAGES,
    Served,
    TokenBatch,
    by_token,
    chosen_tokens,
    has_stage,
    last_tokens,
    log_unknown,
    request_names,
    running,
)
from hookline.factories.token_owners import count_tokens
from hookline.observe.patch.edits import steer as steer_edit
from hookline.observe.patch.parts import main_output, misfit, rebuilt, shape_of, site_text
from hookline.sites import _torch
from hookline.sites.kinds import Kind
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.patch.edits import Edit

__all__ = ["Steer", "steer"]

_NAME: Final = "steer"
_OPTIONS: Final = {
    "vector": None,
    "file": None,
    "key": None,
    "strength": 1.0,
    "positions": "all",
    "requests": None,
    "phase": "both",
}


@tried_by()
def steer(config: Mapping[str, Any] | None = None) -> Steer:
    """Make a hook that adds ``strength`` times a vector to the main tensor of outputs.

    Recipe::

        hook = steer({"vector": [0.0] * 63 + [1.0], "strength": 4.0})
        with hookline.attach(model, "layers.5", hook):
            model(x)

    Args:
        config: ``vector``: a list of numbers, as long as the last dimension of the output; or ``file``, a safetensors
            file, with ``key``, the name of the tensor in it, which may be left out if it is the only one.
            ``strength``: what it is multiplied by, 1 by default. ``positions``: ``"all"``, or ``"last"``, the last
            token of each sequence. ``requests``: names of requests, or patterns of them; the others of a batch stay as
            they are. ``phase``: ``"prefill"`` or ``"decode"`` for one of them alone. The vector takes the dtype and
            the device of the output.
    """
    options = checked_options(_NAME, config, _OPTIONS)
    strength = number(_NAME, "strength", options["strength"])
    positions = choice(_NAME, "positions", options["positions"], ("all", "last"))
    requests = request_names(_NAME, options["requests"])
    stage = choice(_NAME, "phase", options["phase"], STAGES)
    vector = _vector(options)
    if requests is not None or stage != "both":
        return _SteerSome(vector, strength, requests, stage, only_last=positions == "last")
    if positions == "last":
        return _SteerLast(vector, strength)
    return Steer(vector, strength)


def _vector(options: Mapping[str, Any]) -> Tensor:
    given, file, key = options["vector"], options["file"], options["key"]
    if (given is None) == (file is None):
        what = "both" if given is not None else "none"
        raise OptionError(f"{_NAME} takes a vector, or a file that has one, got {what}.")
    if given is not None and key is not None:
        raise OptionError(f"{_NAME}: key is the name of a tensor in file, and there is no file.")
    found = _read(Path(text(_NAME, "file", file)), key) if given is None else _from_list(given)
    if found.dim() != 1 or not found.numel() or not found.is_floating_point() or not bool(found.isfinite().all()):
        shape = tuple(found.shape)
        raise OptionError(f"{_NAME}: a vector is one row of finite real numbers, got {found.dtype} of shape {shape}.")
    return found


def _from_list(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    try:
        with torch.inference_mode(False):
            return torch.tensor(given, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"{_NAME}: vector is a list of numbers; {error}.") from None


def _read(file: Path, key: Any) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with torch.inference_mode(False), safe_open(str(file), framework="pt") as tensors:
            names = sorted(tensors.keys())
            if key is None and len(names) == 1:
                key = names[0]
            if key not in names:
                shown = ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "")
                asked = "no key says which tensor" if key is None else f"there is no {key!r}"
                raise OptionError(f"{_NAME}: {asked} of {file}. It has {shown or 'none'}.")
            found: Tensor = tensors.get_tensor(key)
            return found
    except (OSError, SafetensorError) as error:
        raise OptionError(f"{_NAME}: {file} cannot be read as a safetensors file ({error}).") from None


class Steer(FactoryHook):
    """Add the vector of one ``steer`` at all modules that it is on."""

    name = _NAME
    is_edit = True

    def __init__(self, vector: Tensor, strength: float) -> None:
        self.width = len(vector)
        self.edit: Edit = steer_edit(vector, strength)
        self._tokens: int | None = 0
        """How many tokens it was added to, at all modules together; None once only a device, or a graph, knows it."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added."""
        where = Site(type(module).__name__, module, Kind.FORWARD) if site is None else site
        main = main_output(output, site_text(where))
        steered = rebuilt(output, main, self.edit.apply(main, where), site_text(where))
        if _is_recorded():
            self._tokens = None
        else:  # not the inputs, in which SGLang has its batch: compiled code would keep them for it
            self._add(_rows_of(main, current_batch()))
        return steered

    def to_metrics(self) -> dict[str, float]:
        """Return how many tokens were steered; nothing once that is unknown."""
        return {} if self._tokens is None else {"steered_tokens": float(self._tokens)}

    def _add(self, tokens: int | None) -> None:
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens


class _SteerLast(Steer):
    """Steer the last token of each sequence; a class of its own, as it reads the inputs."""

    def __init__(self, vector: Tensor, strength: float) -> None:
        super().__init__(vector, strength)
        self.last: Edit = steer_edit(vector, strength, index=(..., -1, slice(None)))

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added to the last tokens."""
        where = Site(type(module).__name__, module, Kind.FORWARD) if site is None else site
        main = main_output(output, site_text(where))
        if _is_recorded():
            self._tokens = None
        elif main.dim() > 2:
            self._add(main.shape[:-2].numel())
        if main.dim() > 2:  # batch, sequence, units; padding is on the left
            return rebuilt(output, main, self.last.apply(main, where), site_text(where))
        steered = self.edit.apply(main, where)
        if torch.compiler.is_compiling():
            rows = last_tokens(inputs, main)
            if rows is not None:  # the tokens of all requests in a row, of which these end one
                steered = main.index_put((rows,), steered.index_select(0, rows))
        else:
            served = running(inputs)
            chosen = True if served is None else chosen_tokens(main, served, None, only_last=True)
            steered = steered if chosen is None else _where(chosen, steered, main)
            self._add(_rows_of(main, None) if served is None or chosen is None else _last_of(served))
        return rebuilt(output, main, steered, site_text(where))


class _SteerSome(Steer):
    """Steer some requests, or one stage (prefill or decode); both are looked up in each forward."""

    def __init__(
        self, vector: Tensor, strength: float, requests: tuple[str, ...] | None, stage: str, *, only_last: bool
    ) -> None:
        super().__init__(vector, strength)
        self._requests = requests
        self._stage = stage
        self._only_last = only_last
        self._has_logged = False

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added to the chosen requests; None if there are none."""
        if torch.compiler.is_compiling():
            _refuse()
        served = running(inputs)
        if served is None:
            self._log_unknown()
        if served is None or not has_stage(served, self._stage):
            return None
        where = Site(type(module).__name__, module, Kind.FORWARD) if site is None else site
        main = main_output(output, site_text(where))
        chosen = chosen_tokens(main, served, self._requests, self._only_last, self._stage)
        if chosen is None:
            whose = "steer is for some requests or tokens"
            misfit(whose, site_text(where), f"of shape {shape_of(main)} has no place for each of them", _REMEDY)
        if chosen is False:
            return None
        steered = rebuilt(output, main, _where(chosen, self.edit.apply(main, where), main), site_text(where))
        self._add(count_tokens(served, self._requests, only_last=self._only_last, stage=self._stage))
        return steered

    def _log_unknown(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            log_unknown(self.name, "phase" if self._requests is None else "requests")


_REMEDY: Final = "Put it on a module whose output has the batch, or all tokens, as its first dimension."


def _is_recorded() -> bool:
    """Return whether the call is being made part of a graph, whose runs nobody counts."""
    return torch.compiler.is_compiling() or _torch.capturing()


def _rows_of(main: Tensor, served: Served | None) -> int | None:
    """Return how many tokens an output has, without padding where an engine says what that is; None if unknown."""
    if isinstance(served, TokenBatch) or (served is not None and by_token(main, served) is not None):
        return count_tokens(served, None, only_last=False, stage="both")
    return main.shape[:-1].numel()


def _last_of(served: Served) -> int | None:
    return count_tokens(served, None, only_last=True, stage="both")


def _where(chosen: Tensor | bool, steered: Tensor, main: Tensor) -> Tensor:
    return steered if chosen is True else main if chosen is False else torch.where(chosen, steered, main)


@_torch.constant_while_tracing
def _refuse() -> None:
    raise OptionError(
        "steer has requests= or phase=, and in compiled code an edit is part of the graph, and is made in every "
        "forward or none. Leave these out, or run that module eagerly (torch.compiler.disable)."
    )
