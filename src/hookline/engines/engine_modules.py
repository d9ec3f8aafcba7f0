"""Know the modules of vLLM and SGLang: where hidden states come from, and which are never called.

Their models have three habits: decoder layers return (delta, residual), projections are fused, and tensor parallelism
cuts outputs into columns. Classes are known by their names and attributes; nothing here imports either engine. The
adapters of both call these when a hook is attached or a request begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from hookline.engines.hidden_states import StateSource
from hookline.errors import NoMatchError, OptionError
from hookline.sites.targets import select
from hookline.sites.wrappers import submodule
from hookline.specs.hook_spec import HookSpec

__all__ = ["check_called", "check_no_stop", "find_sources", "never_called"]


def find_sources(model: nn.Module, tp_size: int, layers: Sequence[str], of: str) -> list[StateSource]:
    """Return the sources that names or globs select; raise if one selects none, or what each worker has a part of.

    A name of transformers that the engine has fused into another (``q_proj`` into ``qkv_proj``) selects that part.
    """
    found = dict.fromkeys(source for layer in dict.fromkeys(layers) for source in _sources(model, layer, of))
    modules = dict(model.named_modules(remove_duplicate=False))
    for source in found:
        if tp_size > 1 and _is_cut(modules.get(source.module), of):
            raise OptionError(
                f"{source.title!r}: each worker has a part of its {of}; ask for o_proj, down_proj, a norm or a block, "
                "or attach hookline.factories:export, which writes the part of each."
            )
    return list(found)


def _sources(model: nn.Module, layer: str, of: str) -> Iterator[StateSource]:
    try:
        found = select(model, layer)
    except NoMatchError:
        head, _, last = layer.rpartition(".")
        packed = getattr(model, "packed_modules_mapping", None) or {}
        fused = next((name for name, parts in packed.items() if last in parts), None)
        if fused is None:
            raise
        place = list(packed[fused]).index(last)
        for name, module in select(model, f"{head}.{fused}" if head else fused):
            title = f"{name.rpartition('.')[0]}.{last}".lstrip(".")
            yield StateSource(name, of, title, _columns(module, place) if of == "output" else None)
        return
    for name, _ in found:
        yield StateSource(name, of)


def _columns(module: nn.Module, place: int) -> tuple[int, int] | None:
    sizes = [int(size) for size in getattr(module, "output_partition_sizes", None) or ()]
    return (sum(sizes[:place]), sum(sizes[: place + 1])) if sizes else None


def _is_cut(module: nn.Module | None, of: str) -> bool:
    """Return whether tensor parallelism has cut what a module returns or takes."""
    kind = type(module).__name__
    if of == "input":
        return kind == "RowParallelLinear" and bool(getattr(module, "input_is_parallel", False))
    return ("ColumnParallel" in kind or kind == "QKVParallelLinear") and not getattr(module, "gather_output", False)


def never_called(module: nn.Module | None) -> str | None:
    """Return why the engine does not call a module of this class; None if it does."""
    if type(module).__name__ == "ParallelLMHead":
        return "the engine reads the weights of this module and never calls it; hook 'logits_processor' instead"
    return None


def check_called(model: nn.Module, names: Sequence[str]) -> None:
    """Raise for a hook on modules of which the engine calls none; beside others, they are told as silent."""
    causes = [never_called(submodule(model, name.partition(":")[0]) if name else model) for name in names]
    if causes and all(causes):
        raise OptionError(f"A hook on {', '.join(map(repr, names))} would never fire: {causes[0]}.")


def check_no_stop(specs: Sequence[HookSpec | Mapping[str, Any]]) -> None:
    """Raise for a probe that is to end answers: these engines end theirs by themselves."""
    for spec in specs:
        given = vars(spec) if isinstance(spec, HookSpec) else spec
        is_probe = str(given.get("hook_factory")).replace(":", ".").rpartition(".")[2] == "probe"
        if is_probe and (given.get("config") or {}).get("action") == "stop":
            raise OptionError("action='stop' ends no answer on this engine; use action='flag', and cancel the request.")
