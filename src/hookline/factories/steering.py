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
from hookline.factories.factory_hook import FactoryHook, checked_options, choice, number, text, tried_by
from hookline.factories.served_batch import STAGES, log_unknown, request_names, running
from hookline.observe.patch.edits import steer as steer_edit
from hookline.observe.patch.parts import main_output, misfit, rebuilt, shape_of, site_text
from hookline.observe.tokens import current_tokens
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
    if requests is None and stage == "both" and positions == "all":
        return Steer(vector, strength)
    return _SteerSome(vector, strength, requests, stage, only_last=positions == "last")


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
        """How many tokens it was added to, at all modules together; None once it is part of a graph."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added."""
        where = Site(type(module).__name__, module, Kind.FORWARD) if site is None else site
        main = main_output(output, site_text(where))
        steered = rebuilt(output, main, self.edit.apply(main, where), site_text(where))
        if torch.compiler.is_compiling():  # part of a graph, whose runs nobody counts
            self._tokens = None
        else:  # not the inputs, in which SGLang has its batch: compiled code would keep them for it
            tokens = current_tokens()
            is_by_token = tokens is not None and tokens.by_token(main) is not None
            self._add(len(tokens.choose()) if tokens is not None and is_by_token else main.shape[:-1].numel())
        return steered

    def to_metrics(self) -> dict[str, float]:
        """Return how many tokens were steered; nothing once that is unknown."""
        return {} if self._tokens is None else {"steered_tokens": float(self._tokens)}

    def _add(self, tokens: int) -> None:
        self._tokens = None if self._tokens is None or _torch.capturing() else self._tokens + tokens


class _SteerSome(Steer):
    """Steer some requests, one stage, or last tokens; a class of its own, as it reads the inputs."""

    def __init__(
        self, vector: Tensor, strength: float, requests: tuple[str, ...] | None, stage: str, *, only_last: bool
    ) -> None:
        super().__init__(vector, strength)
        self.last: Edit = steer_edit(vector, strength, index=(..., -1, slice(None)))
        self._requests = requests
        self._stage = stage
        self._only_last = only_last
        self._needs_tokens = requests is not None or stage != "both"
        self._has_logged = False

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added to the chosen tokens; None if there are none."""
        if self._needs_tokens and torch.compiler.is_compiling():
            _refuse()
        where = Site(type(module).__name__, module, Kind.FORWARD) if site is None else site
        main = main_output(output, site_text(where))
        if torch.compiler.is_compiling():
            self._tokens = None
            steered: Tensor | None = self._last_in_graph(main, inputs, where)
        else:
            steered = self._steered(main, inputs, where)
        return None if steered is None else rebuilt(output, main, steered, site_text(where))

    def _last_in_graph(self, main: Tensor, inputs: Any, where: Site) -> Tensor:
        if main.dim() > 2:  # batch, sequence, units; padding is on the left
            return self.last.apply(main, where)
        steered = self.edit.apply(main, where)
        rows = _last_rows(inputs, main)
        return steered if rows is None else main.index_put((rows,), steered.index_select(0, rows))

    def _steered(self, main: Tensor, inputs: Any, where: Site) -> Tensor | None:
        tokens = running(inputs)
        if tokens is None or (self._requests is not None and not tokens.has_names):
            return self._without_tokens(main, where)
        chosen = tokens.choose(self._requests, last=self._only_last, stage=self._stage)
        mask = chosen.mask(main)
        if mask is False:
            return None
        if mask is None and not self._needs_tokens:
            return self._without_tokens(main, where)
        if mask is None:
            whose = "steer is for some requests or tokens"
            misfit(whose, site_text(where), f"of shape {shape_of(main)} has no place for each of them", _REMEDY)
        steered = self.edit.apply(main, where)
        self._add(len(chosen))
        return torch.where(mask, steered, main) if isinstance(mask, Tensor) else steered

    def _without_tokens(self, main: Tensor, where: Site) -> Tensor | None:
        """Return the output steered at the last tokens, where nobody says whose tokens it has."""
        if self._needs_tokens:
            if not self._has_logged:
                self._has_logged = True
                log_unknown(self.name, "phase" if self._requests is None else "requests")
            return None
        self._add(main.shape[:-2].numel() if main.dim() > 2 else main.shape[:-1].numel())
        return self.last.apply(main, where) if main.dim() > 2 else self.edit.apply(main, where)


_REMEDY: Final = "Put it on a module whose output has the batch, or all tokens, as its first dimension."


def _last_rows(inputs: Any, main: Tensor) -> Tensor | None:
    """Return which rows of a flat batch of SGLang are the last of their request; None if all are, or it is unknown."""
    for each in inputs if isinstance(inputs, tuple) else ():
        lengths = None if isinstance(each, Tensor) else getattr(each, "extend_seq_lens", None)
        if isinstance(lengths, Tensor):
            return lengths.to(main.device, torch.int64, non_blocking=True).cumsum(0) - 1
    return None


@_torch.constant_while_tracing
def _refuse() -> None:
    raise OptionError(
        "steer has requests= or phase=, and in compiled code an edit is part of the graph, and is made in every "
        "forward or none. Leave these out, or run that module eagerly (torch.compiler.disable)."
    )
