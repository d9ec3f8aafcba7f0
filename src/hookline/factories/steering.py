"""``steer``: add a vector to the outputs of modules.

Specs and users make it, with a vector from a config or a safetensors file. The arithmetic and its errors are those of
`hookline.edits.steer`. In a served batch it may be for some requests, which `served_batch` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.factory_hook import FactoryHook, read_options, read_tensors, tried_by
from hookline.factories.served_batch import TokenOptions, running
from hookline.observe.patching import main_output, misfit, rebuilt, shape_of, site_text
from hookline.observe.patching import steer as steer_edit
from hookline.observe.tokens import current_tokens
from hookline.sites import _torch
from hookline.sites.hook_at_site import Site
from hookline.sites.kinds import Kind

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SteerOptions(TokenOptions):
    """The config of ``steer``."""

    vector: Any = None
    file: Path | None = None
    key: str | None = None
    strength: float = 1.0

    def __post_init__(self) -> None:
        if (self.vector is None) == (self.file is None):
            what = "both" if self.vector is not None else "none"
            raise OptionError(f"steer takes a vector, or a file that has one, got {what}.")

    def read_vector(self) -> Tensor:
        """Return the vector, from the config or the file."""
        found = _from_list(self.vector) if self.file is None else _from_file(self.file, self.key)
        if found.dim() != 1 or not found.numel() or not found.is_floating_point() or not bool(found.isfinite().all()):
            raise OptionError(
                f"steer: a vector is one row of finite real numbers, got {found.dtype} of shape {tuple(found.shape)}."
            )
        return found


def _from_list(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    try:
        with torch.inference_mode(False):
            return torch.tensor(given, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"steer: vector is a list of numbers; {error}.") from None


def _from_file(file: Path, key: str | None) -> Tensor:
    found = read_tensors("steer", file)
    chosen = next(iter(found)) if key is None and len(found) == 1 else key
    if chosen is None or chosen not in found:
        shown = ", ".join(map(repr, sorted(found)[:8])) or "none"
        asked = "no key says which tensor" if key is None else f"there is no {key!r}"
        raise OptionError(f"steer: {asked} of {file}. It has {shown}.")
    return found[chosen]


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
    options = read_options("steer", SteerOptions, config)
    is_for_all = not options.needs_tokens and options.positions == "all"
    return Steer(options) if is_for_all else SteerSome(options)


class Steer(FactoryHook):
    """Add the vector of one ``steer`` at all modules that it is on."""

    name = "steer"
    is_edit = True

    def __init__(self, options: SteerOptions) -> None:
        vector = options.read_vector()
        self.width = len(vector)
        self._options = options
        self.edit = steer_edit(vector, options.strength)
        self._last = steer_edit(vector, options.strength, index=(..., -1, slice(None)))
        self._tokens: int | None = 0
        """How many tokens it was added to, at all modules together; None once it is part of a graph."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added."""
        where = _site(module, site)
        main = main_output(output, site_text(where))
        steered = self.edit.apply(main, where)
        if torch.compiler.is_compiling():  # part of a graph, whose runs nobody counts
            self._tokens = None
        else:  # not the inputs, in which SGLang has its batch: compiled code would keep them for it
            tokens = current_tokens()
            is_by_token = tokens is not None and tokens.by_token(main) is not None
            self._count(len(tokens.choose()) if tokens is not None and is_by_token else main.shape[:-1].numel())
        return rebuilt(output, main, steered, site_text(where))

    def to_metrics(self) -> dict[str, float]:
        """Return how many tokens were steered; nothing once that is unknown."""
        return {} if self._tokens is None else {"steered_tokens": float(self._tokens)}

    def _count(self, tokens: int) -> None:
        self._tokens = None if self._tokens is None or _torch.capturing() else self._tokens + tokens


class SteerSome(Steer):
    """Steer some requests, one stage, or last tokens; a class of its own, as it reads the inputs."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the vector added to the chosen tokens; None if there are none."""
        where = _site(module, site)
        main = main_output(output, site_text(where))
        if not torch.compiler.is_compiling():
            steered = self._steered(main, inputs, where)
        elif self._options.needs_tokens or main.dim() < 3:
            _refuse()
        else:  # batch, sequence, units; padding is on the left
            self._tokens = None
            steered = self._last.apply(main, where)
        return None if steered is None else rebuilt(output, main, steered, site_text(where))

    def _steered(self, main: Tensor, inputs: Any, where: Site) -> Tensor | None:
        chosen = self._options.choose(running(inputs))
        mask = None if chosen is None else chosen.mask(main)
        if chosen is not None and mask is not None:
            if mask is False:
                return None
            self._count(len(chosen))
            steered = self.edit.apply(main, where)
            return torch.where(mask, steered, main) if isinstance(mask, Tensor) else steered
        if not self._options.needs_tokens:  # the last token of each sequence, of an output of any form
            self._count(main.shape[:-2].numel() if main.dim() > 2 else main.shape[:-1].numel())
            return (self._last if main.dim() > 2 else self.edit).apply(main, where)
        if chosen is not None:
            whose = "steer is for some requests or tokens"
            misfit(whose, site_text(where), f"of shape {shape_of(main)} has no place for each of them", _REMEDY)
        self.log_unknown("phase" if self._options.requests is None else "requests")
        return None


_REMEDY: Final = "Put it on a module whose output has the batch, or all tokens, as its first dimension."


def _site(module: nn.Module, site: Site | None) -> Site:
    return Site(type(module).__name__, module, Kind.FORWARD) if site is None else site


@_torch.constant_while_tracing
def _refuse() -> None:
    raise OptionError(
        "steer has requests=, phase=, or positions= for a flat batch, and in compiled code an edit is part of the "
        "graph, and is made in every forward or none. Leave these out, or run that module eagerly "
        "(torch.compiler.disable)."
    )
