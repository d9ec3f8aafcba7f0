"""Run a wrong model with tensors of a right run put in, and say how far its end is off.

`bisect` calls `BisectTrials`: once to learn which call follows which, then once per trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.debug.compare.rounding import WITHIN, RoundingModel, verdict_on
from hookline.debug.compare.run_values import RunValue
from hookline.debug.compare.tensor_errors import tensor_errors
from hookline.errors import CompareError
from hookline.guard.guard import rollback
from hookline.sites.attach import attach
from hookline.sites.site_info import Site
from hookline.tree import leaves, map_tensors

__all__ = ["ROOT", "BisectTrials", "CallLeaves", "SiteCall"]

SiteCall: TypeAlias = tuple[str, int]
"""A site, and which of its calls."""

CallLeaves: TypeAlias = Mapping[str, RunValue]
"""The tensors of the right run at one call, by leaf."""

ROOT: Final[SiteCall] = ("", 0)
"""The call of the model itself."""


class BisectTrials:
    """Runs the wrong model with tensors of the right run put in."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module], Any],
        end: CallLeaves,
        tolerance: float | None,
    ) -> None:
        self.model, self.run, self.end, self.tolerance = model, run, end, tolerance
        self.ended: list[SiteCall] = []
        """All calls, in the order in which they end; `run_alone` fills it."""
        self.callers: dict[SiteCall, SiteCall] = {}
        """For each call the one during which it was made. The dotted name does not tell: modules may be shared."""
        self.floor = 0.0

    def run_alone(self) -> float:
        """Run the model with nothing put in, note its calls, and return the relative error of the end."""
        open_calls: list[SiteCall] = []

        def begin(module: nn.Module, args: Any, *, site: Site) -> None:
            call = (site.name, site.call)
            self.callers.setdefault(call, open_calls[-1] if open_calls else ROOT)
            open_calls.append(call)

        def finish(module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
            call = (site.name, site.call)
            self.ended.append(call)
            if call in open_calls:
                del open_calls[open_calls.index(call) :]

        with rollback(self.model), torch.no_grad():
            first = attach(self.model, "*", begin, on="forward_pre", observe=True, name="bisect")
            last = attach(self.model, "*", finish, observe=True, name="bisect")
            try:
                end = self.run(self.model)
            finally:
                first.remove(quiet=True)
                last.remove(quiet=True)
        self.ended = list(dict.fromkeys(self.ended))
        self._set_floor()
        return self._error(end)

    def _set_floor(self) -> None:
        rounding = RoundingModel()
        dtype = next(iter(self.end.values())).dtype
        own = next((str(one.dtype).removeprefix("torch.") for one in self.model.parameters()), dtype)
        self.floor = max(rounding.next_floor(dtype, own) for _ in [ROOT, *self.ended])

    def is_right(self, error: float) -> bool:
        """Return whether an error of the end is within the tolerance, or rounding."""
        if self.tolerance is not None:
            return error <= self.tolerance
        return verdict_on(error, self.floor)[0] == WITHIN

    def error_with(self, outputs: Mapping[SiteCall, CallLeaves]) -> float:
        """Return the relative error of the end, with the outputs of some calls put in."""

        def swap(module: nn.Module, args: Any, output: Any, *, site: Site) -> Any:
            return _with_outputs(output, outputs.get((site.name, site.call), {}), site)

        with rollback(self.model), torch.no_grad():
            names = list(dict.fromkeys(name for name, _ in outputs))
            handle = attach(self.model, names, swap, name="bisect") if names else None
            try:
                end = self.run(self.model)
            finally:
                if handle is not None:
                    handle.remove(quiet=True)
            return self._error(end)

    def error_given(
        self, outputs: Mapping[SiteCall, CallLeaves], call: SiteCall, given: CallLeaves
    ) -> tuple[float, bool]:
        """Return the error of the end with the input of ``call`` put in as well, and whether all of it had a place."""
        missing = set(given)

        def hand_over(module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> Any:
            if (site.name, site.call) != call:
                return None
            changed, placed = _with_inputs(args, kwargs, given)
            missing.difference_update(placed)
            return changed

        handle = attach(self.model, call[0], hand_over, on="forward_pre", with_kwargs=True, name="bisect")
        try:
            return self.error_with(outputs), not missing
        finally:
            handle.remove(quiet=True)

    def _error(self, end: Any) -> float:
        errors = []
        for path, tensor in leaves(end):
            value = self.end.get(str(path))
            if isinstance(tensor, Tensor) and value is not None and value.shape == tuple(tensor.shape):
                assert value.read is not None
                errors.append(tensor_errors(value.read().to(tensor.device), tensor).rel_l2)
        if not errors:
            raise CompareError("The end of the model has no tensor of the shape that the right run ends with.")
        return max(errors)


def _with_outputs(output: Any, right: CallLeaves, site: Site) -> Any:
    """Return an output with the tensors of the right run in place of its own."""

    def change(path: str, tensor: Tensor) -> Tensor:
        value = right.get(str(path)) or (next(iter(right.values())) if len(right) == 1 else None)
        if value is None or value.read is None:
            return tensor
        if value.shape != tuple(tensor.shape):
            raise CompareError(
                f"The output of {site.name!r} has shape {tuple(tensor.shape)}, and {value.shape} in the right run: run "
                "both with the same inputs."
            )
        return value.read().to(device=tensor.device, dtype=tensor.dtype, copy=True)

    return map_tensors(output, change)


def _with_inputs(args: Any, kwargs: Any, right: CallLeaves) -> tuple[Any, set[str]]:
    """Return arguments with the tensors of the right run put in, and the leaves that need no place any more.

    Objects that are no plain containers (a KV cache) are left alone: the model goes on filling its own.
    """
    placed: set[str] = set()

    def change(path: str, tensor: Tensor) -> Tensor:
        # A trace writes keyword arguments as "kwargs.mask", a cache as "mask".
        leaf = next((leaf for leaf in (path, f"kwargs.{path}") if leaf in right), None)
        value = right[leaf] if leaf is not None else None
        if leaf is None or value is None or value.read is None:
            return tensor
        placed.add(leaf)
        found = value.read()
        is_float = found.is_floating_point() and tensor.is_floating_point()
        return found.to(device=tensor.device, dtype=tensor.dtype if is_float else found.dtype, copy=True)

    def put(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) or type(value) in (tuple, list, dict):
            return map_tensors(value, change, path=name)
        if value is not None:
            placed.update(leaf for leaf in right if leaf.removeprefix("kwargs.").partition(".")[0] == name)
        return value

    changed = tuple(put(str(place), value) for place, value in enumerate(args))
    return (changed, {name: put(name, value) for name, value in kwargs.items()}), placed
