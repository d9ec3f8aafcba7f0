"""Dump what every leaf of a model gives out, one file for each pass: SGLang's tensor dump.

Servers call `register_forward_hook_for_model`, which attaches observers and returns a `TensorDumper`. A pass is one
forward of the model; its file has everything of that pass, the top module and ``lm_head`` included.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor, nn

from hookline.errors import NoMatchError, OptionError
from hookline.messages import nearest_names
from hookline.sglang.general_dumper import host_copy, save_tensors
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.site_info import Site
from hookline.sites.wrappers import clean_modules, unwrap
from hookline.tree import children, leaves

__all__ = ["TensorDumper", "register_forward_hook_for_model"]

logger = logging.getLogger(__name__)

TOP_MODULE: Final = "TENSOR_DUMP_TOP_LEVEL_MODULE_NAME"
LAYERS_MODULE: Final = "TENSOR_DUMP_LAYERS_MODULE_NAME"
"""Environment variables that name the top module (``model``) and its list of layers (``layers``)."""
_BATCH_FIELDS: Final = ("input_ids", "seq_lens", "positions")


class TensorDumper:
    """The passes of a model, as files ``Pass00000.pt``, ``Pass00001.pt``, …: each a dict of names and CPU tensors.

    Made by `register_forward_hook_for_model`. Read a file with ``torch.load(path, weights_only=True)``.
    """

    def __init__(self, folder: Path, root: nn.Module, top: str) -> None:
        self.folder = folder
        """Where the files are."""
        self.passes = 0
        """How many there are, the one that runs included."""
        self.handles = HandleSet()
        self._root, self._top = root, top
        self._tensors: dict[str, Any] = {}
        """What the pass that runs has so far."""
        self._is_past_top = False

    def add_tensor(self, name: str, value: Any) -> None:
        """Add copies of the tensors in ``value`` to the pass that runs; a name that is there gets ``#1``, ``#2``, …"""
        for path, tensors in _copies(name, value):
            number, free = 0, path
            while free in self._tensors:
                number += 1
                free = f"{path}#{number}"
            if not self._tensors:
                self.passes += 1
            self._tensors[free] = tensors

    def dump_current_tensors(self) -> Path | None:
        """Write what the pass that runs has so far, and return the file; None if there is nothing."""
        if not self._tensors:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"Pass{self.passes - 1:05d}.pt"
        save_tensors(self._tensors, path)
        return path

    def remove(self) -> None:
        """Take the hooks off; what a pass without an end has left is written. May be repeated."""
        self.handles.remove(quiet=True)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<TensorDumper in {self.folder}, {self.passes} passes>"

    # -- passes: forwards of the root; where its forward() is called directly, from one top module to the next ---------

    def _end(self, *call: Any) -> None:
        """Write the pass; a hook on the root, before and after its forward."""
        self.dump_current_tensors()
        self._tensors, self._is_past_top = {}, False

    def _top_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_past_top and not _torch.times_running(self._root):
            self._end()
        for value in (*args, *kwargs.values()):
            if isinstance(getattr(value, "tensors", None), dict) or _fields_of_batch(value):
                self.add_tensor(self._top, value)

    def _see(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        is_direct = not _torch.times_running(self._root)
        if is_direct and self._is_past_top and site.name in self._tensors:
            self._end()
        self.add_tensor(site.name, output)
        self._is_past_top = self._is_past_top or site.name == self._top
        if is_direct and self._is_past_top:
            self.dump_current_tensors()  # nobody will say that the pass is over


def register_forward_hook_for_model(
    model: nn.Module,
    dump_dir: str | Path,
    dump_layers: Iterable[int] | int | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    pp_rank: int = 0,
) -> TensorDumper:
    """Dump the outputs of every module without children, and of the top module, at each pass.

    Recipe::

        with hookline.sglang.register_forward_hook_for_model(model, "dumps", [0, 11]) as dumper:
            model(input_ids)
        tensors = torch.load(dumper.folder / "Pass00000.pt", weights_only=True)

    Args:
        model: The model; it has a module ``model`` (or as ``TENSOR_DUMP_TOP_LEVEL_MODULE_NAME`` says) with a list
            ``layers`` (``TENSOR_DUMP_LAYERS_MODULE_NAME``).
        dump_dir: The files are in its folder ``TP{tp}_PP{pp}_Rank{rank}_pid{pid}``.
        dump_layers: Which layers; None: all. Modules outside of layers are always dumped.
        tp_size: How many ranks share a layer.
        tp_rank: Which of them this is.
        pp_rank: Which stage of a pipeline this is.

    Raises:
        NoMatchError: if there is no top module of that name.
        OptionError: for a layer that the model does not have.
    """
    root = unwrap(model)
    top = os.environ.get(TOP_MODULE) or "model"
    names = dict(clean_modules(model))
    if top not in names:
        near = ", ".join(map(repr, nearest_names(top, [name for name in names if name])))
        raise NoMatchError(f"model should have a module named {top}; nearest: {near}. Set {TOP_MODULE} to its name.")
    chosen = _chosen(names, top, f"{top}.{os.environ.get(LAYERS_MODULE) or 'layers'}.", dump_layers)
    rank = tp_size * pp_rank + tp_rank
    dumper = TensorDumper(Path(dump_dir) / f"TP{tp_rank}_PP{pp_rank}_Rank{rank}_pid{os.getpid()}", root, top)
    options: dict[str, Any] = {"observe": True, "name": "TensorDumper"}
    add = dumper.handles.add
    add(attach(model, dumper._end, on="forward_pre", **options))
    add(attach(model, top, dumper._top_begins, on="forward_pre", with_kwargs=True, **options))
    add(attach(model, lambda name, module: name in chosen, dumper._see, **options))
    add(attach(model, dumper._end, always_call=True, **options))
    return dumper


def _chosen(names: Mapping[str, nn.Module], top: str, layers: str, wanted: Iterable[int] | int | None) -> set[str]:
    """Return the names of the top module and of all leaves outside of layers, or in one that is wanted."""
    parts = {name: name.removeprefix(layers).partition(".")[0] for name in names if name.startswith(layers)}
    numbers = {name: int(part) for name, part in parts.items() if part.isdigit()}
    kept = set(numbers.values()) if wanted is None else {wanted} if isinstance(wanted, int) else set(wanted)
    unknown = sorted(kept - set(numbers.values()), key=str)
    if unknown:
        there = f"{min(numbers.values())} to {max(numbers.values())}" if numbers else "none"
        raise OptionError(f"dump_layers has {unknown[0]!r}; the layers under {layers!r} are: {there}.")
    leaf_names = [name for name, module in names.items() if name and not any(True for _ in module.children())]
    return {top} | {name for name in leaf_names if name not in numbers or numbers[name] in kept}


def _fields_of_batch(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch like SGLang's ``ForwardBatch``; nothing of another value."""
    fields = {name: getattr(value, name, None) for name in _BATCH_FIELDS}
    found = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
    return found if len(found) == len(fields) else {}


def _copies(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and copies: a tensor, or several, by the rules of SGLang's dump; other containers leaf by leaf."""
    proxy, logits = getattr(value, "tensors", None), getattr(value, "next_token_logits", None)
    if isinstance(value, Tensor):
        yield name, host_copy(value)
    elif isinstance(logits, Tensor):
        yield name, host_copy(logits)
    elif isinstance(proxy, dict):  # between the stages of a pipeline
        yield from ((f"{name}.pp_proxy_tensors.{key}", host_copy(each)) for key, each in proxy.items())
    elif batch := _fields_of_batch(value):
        yield from ((f"{name}.forward_batch_info.{key}", host_copy(each)) for key, each in batch.items())
    elif type(value) in (tuple, list) and all(isinstance(item, Tensor | None) for item in value):
        copies = [host_copy(item) for item in value if item is not None]
        if copies:
            yield name, copies[0] if len(copies) == 1 else copies
    elif children(value) is None:
        logger.warning("Unsupported type: %s of %s; nothing of it is dumped", type(value).__name__, name)
    else:
        yield from ((f"{name}.{path}", host_copy(leaf)) for path, leaf in leaves(value) if isinstance(leaf, Tensor))
