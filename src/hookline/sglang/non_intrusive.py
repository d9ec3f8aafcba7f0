"""Dump what modules take and give by hooks, without a line in the model's code.

`Dumper.register_non_intrusive_dumper` calls `attach_dump_hooks`; the hooks call `Dumper.dump`, with SGLang's names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from hookline.sglang.layer_ids import find_layers
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.wrappers import unwrap
from hookline.tree import leaves

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["attach_dump_hooks"]

CORE_FIELDS: Final = (
    *("input_ids", "positions", "seq_lens", "req_pool_indices", "rids"),
    *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
)
"""What ``core`` dumps of the model's arguments, and of the batch among them."""


def attach_dump_hooks(model: nn.Module, dump: Callable[..., None], mode: str) -> HandleSet:
    """Attach the hooks of a ``mode`` (see `Dumper.register_non_intrusive_dumper`), which call ``dump(name, value)``."""
    if mode == "off":
        return HandleSet()
    layers = find_layers(model)
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
