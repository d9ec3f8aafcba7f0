"""``record_mean``: keep the mean activation of each module over all tokens, for ablations and steering.

Specs and users make it. It writes a vector per module to a safetensors file, or returns them. Sums are formed on the
device of the tensor, and kept in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.factory_hook import ByModule, Observer, checked_options, path, tried_by, yes_or_no
from hookline.factories.served_batch import measurable, output_tensor, without_padding
from hookline.files import replace_file
from hookline.observe.host_values import on_host, unit_axis
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["RecordMean", "record_mean"]

_NAME: Final = "record_mean"
_OPTIONS: Final = {"file": None, "add_residual": False}


@tried_by()
def record_mean(config: Mapping[str, Any] | None = None) -> RecordMean:
    """Make a hook that keeps the running mean of the main tensor of outputs, over everything but the units.

    Recipe::

        hook = record_mean({})
        with hookline.attach(model, "layers.#", hook):
            model(many_prompts)
        hookline.patch(model, {"layers.3": hookline.edits.mean_ablate(hook.means())})

    Args:
        config: ``file``: a safetensors file to which ``close()`` writes one vector per module, by its name.
            ``add_residual``: of an output that is a pair of tensors of one shape, as SGLang's layers give, take the
            sum. Units are the last dimension, of images (four dimensions or more) the second.
    """
    options = checked_options(_NAME, config, _OPTIONS)
    file = None if options["file"] is None else path(_NAME, "file", options["file"])
    return RecordMean(file, add_residual=yes_or_no(_NAME, "add_residual", options["add_residual"]))


_Sums: TypeAlias = dict[tuple[torch.device, int], tuple[Tensor, list[int]]]
"""The sum of one module, and over how many tokens, by device and number of units."""


class RecordMean(Observer):
    """Keep the means of all modules that one ``record_mean`` is on."""

    name = _NAME

    def __init__(self, file: Path | None = None, *, add_residual: bool = False) -> None:
        self._file = file
        self._add_residual = add_residual
        self._sums: ByModule[_Sums] = ByModule(lambda name: {})
        self._lock = threading.Lock()

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Add the output of a module."""
        if not _torch.in_recomputation():
            self._take(module, site, output)

    def _take(self, module: nn.Module, site: Site | None, output: Any) -> None:
        tensor = measurable(output_tensor(output, self._add_residual))
        tensor = None if tensor is None else without_padding(tensor.dequantize() if tensor.is_quantized else tensor)
        if tensor is None or not tensor.numel() or not tensor.dim() or tensor.is_complex():
            return
        units = unit_axis(tensor, None)
        others = [dim for dim in range(tensor.dim()) if dim != units]
        with torch.no_grad():
            # In float32, of half precision too; float64 has no cost only where it was float64 before.
            wide = torch.float64 if not tensor.is_floating_point() or tensor.dtype is torch.float64 else torch.float32
            total = tensor.sum(others, dtype=wide) if others else tensor.to(wide)
            with self._lock:
                kept, count = self._kept(self._sums.of(module, site), total)
                kept.add_(total)
                count[0] += tensor.numel() // total.numel()

    def _kept(self, sums: _Sums, total: Tensor) -> tuple[Tensor, list[int]]:
        key = (total.device, total.numel())
        if key not in sums:
            dtype = torch.float32 if total.device.type == "mps" else torch.float64  # which has no float64
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside of it
                sums[key] = (torch.zeros(total.numel(), dtype=dtype, device=total.device), [0])
        return sums[key]

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each module so far, in float32 on the CPU; of several widths, the one with most tokens."""
        return {name: mean for name, (mean, _) in self._counted_means().items()}

    def tokens(self) -> dict[str, int]:
        """Return over how many tokens (or samples) each mean is."""
        return {name: count for name, (_, count) in self._counted_means().items()}

    def _counted_means(self) -> dict[str, tuple[Tensor, int]]:
        """Return the mean of each module, and over how many tokens it is."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            kept = [(name, total, count) for name, sums in self._sums.items() for total, (count,) in sums.values()]
            # Copies: another thread may add to what is on the CPU.
            totals = [each.to(torch.float64, copy=True) for each in on_host(total for _, total, _ in kept)]
        by_name: dict[str, dict[int, tuple[Tensor, int]]] = {}
        for (name, _, count), total in zip(kept, totals, strict=True):
            by_width = by_name.setdefault(name, {})
            before, tokens = by_width.get(total.numel(), (torch.zeros_like(total), 0))
            by_width[total.numel()] = (before + total, tokens + count)
        most = {name: max(by_width.values(), key=lambda each: each[1]) for name, by_width in by_name.items()}
        return {name: ((total / count).float(), count) for name, (total, count) in most.items()}

    def to_metrics(self) -> dict[str, float]:
        """Return, for each module, the number of tokens and the norm of the mean."""
        found = self._counted_means()
        metrics = {f"{name}/tokens": float(count) for name, (_, count) in found.items()}
        return metrics | {f"{name}/norm": float(mean.norm()) for name, (mean, _) in found.items()}

    def save(self, file: str | Path | None = None) -> Path:
        """Write the means so far to a safetensors file, and return its path."""
        from safetensors.torch import save_file

        target = self._file if file is None else Path(file)
        if target is None:
            raise OptionError("record_mean has no file to write to: give save() a path, or its config a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        found = self._counted_means()
        tokens = {f"tokens/{name}": str(count) for name, (_, count) in found.items()}
        means = {name: mean for name, (mean, _) in found.items()}
        replace_file(target, lambda draft: save_file(means, draft, metadata=tokens))
        return target

    def close(self) -> None:
        """Write the file, if it was given one."""
        if self._file is not None:
            self.save()


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(RecordMean.__call__)
