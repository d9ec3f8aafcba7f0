"""Save a run of several ranks in one folder, and read it with as many ranks, or with another number.

`Saving` calls it; adapters of other trainers take sharded tensors apart by it. Each rank writes a file of its own, with
its part of each sharded tensor; the parameters and moments that all ranks hold alike are in that of rank 0 alone. The
folder gets its name when all ranks have written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline import checkpoint_file
from hookline.distributed._torch_distributed import start_of_part
from hookline.errors import CheckpointError, ResumeError
from hookline.tree import map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.ranks import OneProcess

__all__ = [
    "SUFFIX", "adapt_to_ranks", "is_sharded", "local_parts", "map_dicts", "place_parts", "rank_digest",
    "read_checkpoint", "write_ranks",
]  # fmt: skip

SUFFIX: Final = ".ranks"
"""How the folder of a checkpoint of several ranks ends."""
_LOCAL: Final = "\x1flocal"
"""The key of a part of a sharded tensor in the state of its rank."""


# -- sharded tensors -------------------------------------------------------------------------------------------------


def is_sharded(tensor: Any) -> bool:
    """Return whether ranks hold a tensor in parts."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_parts(tree: Any) -> Any:
    """Return the same structure with this rank's part of each sharded tensor, where it begins, and the whole shape."""

    def part(_: str, tensor: Any) -> Any:
        if not is_sharded(tensor):
            return tensor
        return {_LOCAL: tensor.to_local().detach(), "shape": list(tensor.shape), "start": start_of_part(tensor)}

    return map_tensors(tree, part)


def place_parts(tree: Any, like: Iterable[Tensor]) -> Any:
    """Return what ``local_parts`` was given, with sharded tensors laid out as those of ``like``.

    Of a part that is the whole, as one process has it, every rank takes its own.
    """
    sharded: list[Any] = [tensor for tensor in like if is_sharded(tensor)]

    def place(one: dict[Any, Any]) -> Any:
        if _LOCAL not in one:
            return None
        from torch.distributed.tensor import DTensor, distribute_tensor

        part, shape = one[_LOCAL], torch.Size(one["shape"])
        for each in [tensor for tensor in sharded if tensor.shape == shape]:
            layout = each.device_mesh, each.placements
            if part.shape == shape:  # every rank has the whole, so nothing is sent
                return distribute_tensor(part, *layout, src_data_rank=None)
            if part.shape == each.to_local().shape:
                return DTensor.from_local(part, *layout, run_check=False, shape=shape, stride=each.stride())
        if part.shape == shape:
            return part
        raise ResumeError(
            f"A sharded tensor of shape {tuple(shape)} was saved, and the model has none of that shape and layout. "
            "Next: shard the model as it was, or begin a run in another folder."
        )

    return map_dicts(tree, place)


def map_dicts(value: Any, change: Callable[[dict[Any, Any]], Any]) -> Any:
    """Return the same structure with what `change` makes of a dictionary in its place; None leaves it as it is."""
    if type(value) is dict:
        changed = change(value)
        return {key: map_dicts(item, change) for key, item in value.items()} if changed is None else changed
    if type(value) in (list, tuple):
        return type(value)(map_dicts(item, change) for item in value)
    return value


def _joined(trees: Sequence[Any]) -> Any:
    """Return the first of the trees of all ranks, with the whole of each sharded tensor in place of its part."""
    first = trees[0]
    if type(first) is dict and _LOCAL in first:
        whole = first[_LOCAL].new_empty(first["shape"])
        for one in trees:
            sizes = zip(one["start"], one[_LOCAL].shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in sizes)] = one[_LOCAL]
        return {**first, _LOCAL: whole}
    if type(first) is dict:
        others = [tree for tree in trees if type(tree) is dict]
        return {key: _joined([tree[key] for tree in others if key in tree]) for key in first}
    if type(first) in (list, tuple):
        others = [tree for tree in trees if type(tree) is type(first) and len(tree) == len(first)]
        return type(first)(map(_joined, zip(*others, strict=True)))
    return first


def rank_digest(tree: Any) -> int:
    """Return a number that is the same on two ranks only if they hold the same, each on a device of its own."""
    return checkpoint_file.digest(map_tensors(local_parts(tree), lambda _, tensor: tensor.cpu()))


# -- the checkpoint --------------------------------------------------------------------------------------------------


def _holders(core: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the dictionaries of the tensors of the model, and of the optimizer's for each parameter."""
    optimizer = core["optimizer"] or {"state": {}}
    return [core["model"]["tensors"], *optimizer["state"].get("state", {}).values()]


def write_ranks(path: Path, tree: dict[str, Any], model: nn.Module, ranks: OneProcess) -> int:
    """Write the state of this rank; return the bytes of all. All ranks call it.

    Whatever fails on one rank is raised on all. Until all have written, the folder has another name.
    """
    draft = path.with_name(f".{path.name}")
    own: dict[str, Any] = local_parts(tree)
    digests: dict[str, int] = {}

    def begin() -> None:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        digests.update({name: rank_digest(state) for name, state in tree["manager"]["hooks"].items()})

    def write() -> None:
        if ranks.rank != 0:
            _drop_shared(own["core"], model)
        checkpoint_file.write(draft / f"rank{ranks.rank}.pt", own)

    def commit() -> None:
        if ranks.rank == 0:
            checkpoint_file.sync_folder(draft)
            shutil.rmtree(path, ignore_errors=True)
            draft.replace(path)

    ranks.together("beginning a checkpoint", begin)
    said = ranks.gather(digests, "comparing the hooks in a checkpoint")
    differing = sorted(name for name in said[0] if any(one.get(name) != said[0][name] for one in said))
    own["ranks"] = {"count": ranks.size, "differing": differing}
    ranks.together("writing a checkpoint", write)
    ranks.together("naming a checkpoint", commit)
    return sum(file.stat().st_size for file in path.iterdir())


def _drop_shared(core: Mapping[str, Any], model: nn.Module) -> None:
    """Drop the parameters, and the optimizer's tensors, that all ranks hold alike: those of rank 0 are saved."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for number, held in enumerate(_holders(core)):
        for key in [key for key in held if number or key in parameters]:
            if isinstance(held[key], Tensor):
                del held[key]


def read_checkpoint(
    path: Path, model: nn.Module, home: Callable[[torch.device], torch.device], rank: int = 0, count: int = 1
) -> dict[str, Any]:
    """Return the tree of a checkpoint for a rank, with sharded tensors laid out like those of the model.

    Of one that another number of ranks has saved, it is the tree of rank 0, with whole tensors laid out anew.
    """
    is_folder = path.suffix == SUFFIX

    def read(number: int) -> dict[str, Any]:
        return checkpoint_file.read(path / f"rank{number}.pt" if is_folder else path, home)

    first = read(0)
    before = first.get("ranks", {}).get("count", 1)
    if is_folder and len(list(path.glob("rank*.pt"))) != before:
        raise CheckpointError(f"{path} is not whole: it has not the files of {before} ranks.")
    if before != count:
        tree = _joined([first, *map(read, range(1, before))])
    elif rank == 0:
        tree = first
    else:
        tree = read(rank)
        for held, shared in zip(_holders(tree["core"]), _holders(first["core"]), strict=True):
            held |= {key: value for key, value in shared.items() if key not in held}
    placed: dict[str, Any] = place_parts(tree, model.parameters())
    return placed


def adapt_to_ranks(saved: dict[str, Any], now: int, streams: Mapping[str, Any]) -> str:
    """Drop from the tree what belongs to one rank of another number; return what was lost, in a sentence, or nothing.

    Args:
        saved: The tree; changed in place.
        now: How many ranks go on with it.
        streams: The random streams as they are now, which stay.
    """
    before, differing = saved["ranks"]["count"], saved["ranks"]["differing"]
    if before == now:
        return ""
    run, core = saved["run"], saved["core"]
    core["streams"] = dict(streams)
    core["model"].pop("gradients", None)  # of another part of the data, and perhaps in other shards
    lost = ["random streams"]
    if run["within"]:
        lost.append(f"the place in the data (pass {run['epoch']} over them begins anew)")
        run |= {"within": False, "done": 0, "losses": (None, 0), "accuracies": (None, 0)}
    saved["loader"] = {"fixed": saved["loader"]["fixed"]}
    saved["before_epoch"] = saved["demand"] = None
    if differing:
        hooks = saved["manager"]["hooks"]
        saved["manager"]["hooks"] = {name: state for name, state in hooks.items() if name not in differing}
        lost.append(f"the state of {', '.join(differing)}, which was not the same on all ranks")
    return (
        f"The run was saved by {_processes(before)} and goes on with {_processes(now)}: model, optimizer, scheduler "
        f"and hooks go on where they were. What does not carry over: {'; '.join(lost)}."
    )


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"
