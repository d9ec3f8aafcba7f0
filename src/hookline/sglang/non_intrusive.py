"""Dump what modules take and give by hooks, without a line in the model's code.

`Dumper.register_non_intrusive_dumper` calls `attach_dump_hooks`; the hooks call `Dumper.dump`, with SGLang's names.
Every dump asks `layer_running`: no tag is set and cleared, so that a forward that raises leaves nothing behind.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.wrappers import clean_modules, unwrap
from hookline.tree import leaves

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["attach_dump_hooks", "layer_running"]

CORE_FIELDS: Final = (
    *("input_ids", "positions", "seq_lens", "req_pool_indices", "rids"),
    *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
)
"""What ``core`` dumps of the model's arguments, and of the batch among them."""


def attach_dump_hooks(model: nn.Module, dump: Callable[..., None], mode: str) -> HandleSet:
    """Attach the hooks of a ``mode`` (see `Dumper.register_non_intrusive_dumper`), which call ``dump(name, value)``."""
    if mode == "off":
        return HandleSet()
    layers = _find_layers(model)
    options: dict[str, Any] = {"observe": True, "name": "dumper"}
    if mode == "core":

        def core(module: nn.Module, args: Any, kwargs: Any) -> None:
            _dump_core(dump, module, args, kwargs)

        return HandleSet([attach(model, core, on="forward_pre", with_kwargs=True, **options)])

    def inputs(module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        for key, value in (*enumerate(args), *kwargs.items()):
            _dump_tensors(dump, f"{_name(site.name)}inputs.{key}", value, layers.get(site.name))

    def output(module: nn.Module, args: Any, value: Any, *, site: Site) -> None:
        _dump_tensors(dump, f"{_name(site.name)}output", value, layers.get(site.name))

    handles = HandleSet([attach(model, "*", inputs, on="forward_pre", with_kwargs=True, **options)])
    handles.add(attach(model, "*", output, **options))
    return handles


def _name(site: str) -> str:
    return f"non_intrusive__{site}." if site else "non_intrusive__"


def _dump_tensors(dump: Callable[..., None], name: str, value: Any, layer: int | None) -> None:
    """Dump every tensor in ``value``; one alone has no number behind its name."""
    tags: dict[str, Any] = {} if layer is None else {"layer_id": layer}
    tensors = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)]
    for path, tensor in tensors:
        dump(name if len(tensors) == 1 else f"{name}.{path}", tensor, **tags)


def _dump_core(dump: Callable[..., None], module: nn.Module, args: Any, kwargs: Any) -> None:
    given = _by_name(module, args, kwargs)
    holders = [value for value in given.values() if hasattr(value, "__dict__") and not isinstance(value, Tensor)]
    for field in CORE_FIELDS:
        found = [given.get(field), *(getattr(holder, field, None) for holder in holders)]
        value = next((each for each in found if each is not None), None)
        if value is not None:
            dump(field, value)


def _by_name(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by the names that the forward gives them."""
    try:
        return dict(inspect.signature(unwrap(module).forward).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call itself will raise
        return dict(kwargs)


# -- layers ----------------------------------------------------------------------------------------------------

_LAYER: Final = re.compile(r"(?:.*\.)?layers\.(\d+)")
_KNOWN: Final[weakref.WeakKeyDictionary[nn.Module, int]] = weakref.WeakKeyDictionary()
"""The layers of the models that hooks of the dumper are on."""


def _find_layers(model: nn.Module) -> dict[str, int]:
    """Return the id of the layer for each module in one, by its name, and remember the layers themselves.

    A layer's id is its ``layer_id``, or its ``layer_number`` less 1, or its number in ``layers``.
    """
    ids: dict[str, int] = {}
    found: dict[str, int] = {}
    for name, module in clean_modules(model):
        match = _LAYER.fullmatch(name)
        if match is not None:
            ids[name] = _KNOWN[module] = _id_of(module, int(match[1]))
        # The innermost layer counts: names come with parents first.
        around = [layer for layer in ids if name == layer or name.startswith(f"{layer}.")]
        if around:
            found[name] = ids[around[-1]]
    return found


def layer_running() -> int | None:
    """Return the id of the innermost layer whose forward runs in this thread; None outside of any."""
    if not _KNOWN:
        return None
    return next((_KNOWN[module] for module in _torch.all_running() if module in _KNOWN), None)


def _id_of(module: nn.Module, number: int) -> int:
    own, counted = getattr(module, "layer_id", None), getattr(module, "layer_number", None)
    if isinstance(own, int):
        return own
    return counted - 1 if isinstance(counted, int) else number
