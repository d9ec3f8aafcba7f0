"""``replace_rows``: put saved activations in place of outputs, by request and position.

Specs and users make it. With `stream_of` and `with_stream`, which users may call in factories of their own, it reads
and replaces the residual stream wherever it is: engines' blocks return it in two parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.factory_hook import FactoryHook, read_options, read_tensors, tried_by
from hookline.factories.served_batch import running
from hookline.tree import main_tensor, map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.tokens import Tokens
    from hookline.sites.hook_at_site import Site


# -- the residual stream -----------------------------------------------------------------------------------------


def stream_of(module: nn.Module, value: Any) -> Tensor | None:
    """Return the hidden states in what a module returns, or in ``(args, kwargs)`` that it takes.

    Recipe: ``states = stream_of(module, output)`` in a hook on a block.

    A pair of tensors of one shape that a block takes or returns is (delta, residual), whose sum is the residual stream;
    a norm takes such a pair too. Of what a norm returns it is the first: (normed, residual); of modules without
    children too: a rotary embedding takes and returns queries and keys.
    """
    given = _float_tensors(value)
    is_call = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
    if _is_split(module, given, is_call=is_call):
        return given[0] + given[1]
    return given[0] if given else main_tensor(value)


def with_stream(module: nn.Module, output: Any, stream: Tensor) -> Any:
    """Return ``output`` of a module with other hidden states, in its form; `stream_of` returns these again.

    Recipe: ``return with_stream(module, output, stream_of(module, output) * 0.5)`` in a hook on a block.
    """
    given = _float_tensors(output)
    if not given:
        raise OptionError(f"{type(module).__name__} returns no tensor of real numbers, so that none can be put there.")
    new = [stream]
    if _is_split(module, given):  # all in the first part: the sum with zeros has its bits
        new.append(torch.zeros_like(given[1]))
    return map_tensors(output, lambda path, tensor: new.pop(0) if new and tensor.is_floating_point() else tensor)


def _is_split(module: nn.Module, given: list[Tensor], *, is_call: bool = False) -> bool:
    if len(given) < 2 or given[0].shape != given[1].shape or given[0].dtype != given[1].dtype:
        return False
    is_norm = "norm" in type(module).__name__.lower()
    return is_call if is_norm else next(module.children(), None) is not None


def _float_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of real numbers among the arguments or results of a module, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [found for each in value for found in _float_tensors(each)] if isinstance(value, list | tuple) else []


# -- the factory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplaceRowsOptions:
    """The config of ``replace_rows``."""

    file: Path


@tried_by()
def replace_rows(config: Mapping[str, Any] | None = None) -> ReplaceRows:
    """Make a hook that puts the rows of a file in place of the hidden states that modules return.

    Recipe::

        save_file({"r1/model.layers.5": states}, "states.safetensors")  # (tokens, features), from position 0 on
        hook = replace_rows({"file": "states.safetensors"})

    Args:
        config: ``file``: a safetensors file with a tensor for each request and module, called ``"request/module"``;
            row n is that of position n. What has no row there stays as it is.
    """
    return ReplaceRows(read_options("replace_rows", ReplaceRowsOptions, config))


class ReplaceRows(FactoryHook):
    """Replace rows at all modules that one ``replace_rows`` is on."""

    name = "replace_rows"
    is_edit = True

    def __init__(self, options: ReplaceRowsOptions) -> None:
        self._rows = read_tensors("replace_rows", options.file)
        wrong = {key: tuple(rows.shape) for key, rows in self._rows.items() if "/" not in key or rows.dim() < 2}
        if wrong or not self._rows:
            what = f"has {wrong}" if wrong else "is empty"
            raise OptionError(
                f"replace_rows: {options.file} {what}; it takes tensors (tokens, features) called 'request/module'."
            )
        self._count = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site) -> Any:
        """Return the output with the rows of the file; None if there are none."""
        tokens = running(inputs)
        states = stream_of(module, output)
        entries = None if tokens is None or states is None else tokens.by_token(states)
        if tokens is None or states is None or entries is None:
            self.log_unknown("requests")
            return None
        new, before = entries.clone(), self._count
        for row in range(len(tokens.requests)):
            self._put(new, tokens, row, site.name)
        return with_stream(module, output, new.view_as(states)) if self._count > before else None

    def _put(self, new: Tensor, tokens: Tokens, row: int, module: str) -> None:
        """Put the rows of one request into ``new``."""
        key, first, begin = f"{tokens.requests[row]}/{module}", tokens.firsts[row], tokens.begins[row]
        if key not in self._rows or first is None:
            return
        rows = self._rows[key][first : first + tokens.lengths[row]].to(new.device, non_blocking=True)
        place = new[begin : begin + len(rows)]
        if place.shape != rows.shape:
            raise OptionError(
                f"replace_rows: {key!r} has rows of {tuple(rows.shape[1:])}, the output {tuple(place.shape[1:])}."
            )
        self._count += len(rows)
        place.copy_(rows)

    def to_metrics(self) -> dict[str, float]:
        """Return how many rows were replaced, at all modules together."""
        return {"rows": float(self._count)}
