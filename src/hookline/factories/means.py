"""``record_mean``: keep the mean activation of each module over all tokens, for ablations and steering.

Specs and users make it. It writes a vector per module to a safetensors file, or returns them. Sums are formed on the
device of the tensor, and kept in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import measurable, output_tensor, without_padding
from hookline.files import replace_file
from hookline.observe.host_values import on_host, unit_axis
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["RecordMean", "record_mean"]


@dataclass(frozen=True)
class MeanOptions:
    """The config of ``record_mean``."""

    file: Path | None = None
    add_residual: bool = False


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
    return RecordMean(read_options("record_mean", MeanOptions, config))


@dataclass(slots=True)
class _Sum:
    """The sum of one module, on the device of its first output, and over how many tokens it is."""

    total: Tensor | None = None
    count: int = 0


class RecordMean(Observer):
    """Keep the means of all modules that one ``record_mean`` is on."""

    name = "record_mean"

    def __init__(self, options: MeanOptions) -> None:
        self._options = options
        self._sums = ByModule(lambda name: _Sum())
        self._lock = threading.RLock()

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Add an output to the sum of its module."""
        if not _torch.in_recomputation():  # it was counted the first time
            self._take(module, site, output)

    def _take(self, module: nn.Module, site: Site | None, output: Any) -> None:
        tensor = measurable(output_tensor(output, self._options.add_residual))
        tensor = None if tensor is None else without_padding(tensor.dequantize() if tensor.is_quantized else tensor)
        if tensor is None or not tensor.numel() or not tensor.dim() or tensor.is_complex():
            return
        units = unit_axis(tensor, None)
        others = [dim for dim in range(tensor.dim()) if dim != units]
        # In float32, of half precision too; float64 has no cost only where it was float64 before.
        wide = torch.float64 if not tensor.is_floating_point() or tensor.dtype is torch.float64 else torch.float32
        with torch.no_grad(), self._lock:
            seen = self._sums.of(module, site)
            total = tensor.sum(others, dtype=wide) if others else tensor.to(wide)
            if seen.total is None or len(seen.total) != len(total):  # of another width, it begins anew
                dtype = torch.float32 if total.device.type == "mps" else torch.float64  # which has no float64
                with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside of it
                    seen.total, seen.count = torch.zeros(len(total), dtype=dtype, device=total.device), 0
            seen.total.add_(total.to(seen.total.device))
            seen.count += tensor.numel() // total.numel()

    def _read(self) -> dict[str, tuple[Tensor, int]]:
        """Return mean and tokens of each module, of one moment."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            seen = [(name, each.total, each.count) for name, each in self._sums.items() if each.total is not None]
            totals = on_host(total for _, total, _ in seen)
            pairs = zip(seen, totals, strict=True)
            return {name: ((total.double() / count).float(), count) for (name, _, count), total in pairs}

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each module so far, in float32 on the CPU."""
        return {name: mean for name, (mean, _) in self._read().items()}

    def tokens(self) -> dict[str, int]:
        """Return over how many tokens (or samples) each mean is."""
        return {name: count for name, (_, count) in self._read().items()}

    def to_metrics(self) -> dict[str, float]:
        """Return, for each module, the number of tokens and the norm of the mean."""
        read = self._read().items()
        metrics = {f"{name}/tokens": float(count) for name, (_, count) in read}
        return metrics | {f"{name}/norm": float(mean.norm()) for name, (mean, _) in read}

    def save(self, file: str | Path | None = None) -> Path:
        """Write the means so far to a safetensors file, and return its path."""
        from safetensors.torch import save_file

        target = self._options.file if file is None else Path(file)
        if target is None:
            raise OptionError("record_mean has no file to write to: give save() a path, or its config a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        read = self._read().items()
        tokens = {f"tokens/{name}": str(count) for name, (_, count) in read}
        replace_file(target, lambda draft: save_file({name: mean for name, (mean, _) in read}, draft, metadata=tokens))
        return target

    def close(self) -> None:
        """Write the file, if it was given one."""
        if self._options.file is not None:
            self.save()


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(RecordMean.__call__)
