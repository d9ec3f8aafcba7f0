"""Save a run of several ranks in one folder, and read it with as many ranks, or with another number.

`Saving` calls it; adapters of other trainers take sharded tensors apart by it. Parameters and the optimizer's tensors,
which ranks hold in parts or alike, go through torch.distributed.checkpoint; everything else (random streams, the place
in the data, the state of hooks) is in one file for each rank. The folder gets its name when all ranks have written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline import checkpoint_file
from hookline.errors import CheckpointError, ResumeError
from hookline.tree import map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.ranks import OneProcess

__all__ = [
    "SUFFIX",
    "adapt_to_ranks",
    "local_parts",
    "map_dicts",
    "place_parts",
    "rank_digest",
    "read_checkpoint",
    "write_ranks",
]

SUFFIX: Final = ".ranks"
"""How the folder of a checkpoint of several ranks ends."""
_SHARED: Final = "shared"
_LOCAL: Final = "\x1flocal"
"""The key of a part of a sharded tensor in the state of its rank."""
_Missing: Final = object()
"""Stands for a part that cannot be placed."""


# -- sharded tensors -------------------------------------------------------------------------------------------------


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_parts(tree: Any) -> Any:
    """Return the same structure with this rank's part of each sharded tensor, and the shape of the whole."""

    def part(_: str, tensor: Any) -> Any:
        if not _is_sharded(tensor):
            return tensor
        return {_LOCAL: tensor.to_local().detach(), "shape": list(tensor.shape)}

    return map_tensors(tree, part)


def place_parts(tree: Any, like: Iterable[Tensor], *, same_ranks: bool = True) -> Any:
    """Return what ``local_parts`` was given, with sharded tensors laid out as those of ``like``.

    Parts of another number of ranks make no tensor, and None is in their place; the one part of a single process is
    the whole, of which every rank takes its part.
    """
    sharded = [tensor for tensor in like if _is_sharded(tensor)]

    def place(one: dict[Any, Any]) -> Any:
        if _LOCAL not in one:
            return None
        part, shape = one[_LOCAL], tuple(one["shape"])
        alike = [tensor for tensor in sharded if tuple(tensor.shape) == shape]
        if tuple(part.shape) == shape:
            return _spread(part, alike[0]) if alike else part
        return _place_again(part, shape, alike) if same_ranks else _Missing

    return map_dicts(tree, place)


def _place_again(part: Tensor, shape: tuple[int, ...], alike: Iterable[Any]) -> Tensor:
    """Return the sharded tensor of which `part` is this rank's."""
    from torch.distributed.tensor import DTensor

    for like in alike:
        if like.to_local().shape == part.shape:
            return DTensor.from_local(
                part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
    raise ResumeError(
        f"A sharded tensor of shape {shape} was saved, and the model has none of that shape and layout here. Next: "
        "shard the model as it was, or begin a run in another folder."
    )


def _spread(whole: Tensor, like: Any) -> Tensor:
    """Return a whole tensor laid out like another one of its shape; itself if that is not sharded, or this is."""
    if not _is_sharded(like) or _is_sharded(whole) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole, so nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def map_dicts(value: Any, change: Callable[[dict[Any, Any]], Any]) -> Any:
    """Return the same structure with what `change` makes of a dictionary in its place; None leaves it as it is."""
    if type(value) is dict:
        changed = change(value)
        if changed is _Missing:
            return None
        return {key: map_dicts(item, change) for key, item in value.items()} if changed is None else changed
    if type(value) in (list, tuple):
        return type(value)(map_dicts(item, change) for item in value)
    return value


def rank_digest(tree: Any) -> int:
    """Return a number that is the same on two ranks only if they hold the same, each on a device of its own."""
    return checkpoint_file.digest(map_tensors(local_parts(tree), lambda _, tensor: tensor.cpu()))


# -- the part that ranks share ---------------------------------------------------------------------------------------


def _shared_places(core: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the dictionary and the key of each tensor that ranks hold in parts or alike."""
    tensors = core["model"]["tensors"]
    yield from [(f"model/{name}", tensors, name) for name in tensors if f"model/{name}" in parameters]
    states = (core["optimizer"] or {"state": {}})["state"].get("state", {})
    for index, state in states.items():
        yield from [(f"optimizer/{index}/{key}", state, key) for key in state if isinstance(state[key], Tensor)]


def _parameters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the parameters by the names that they, or their states in the optimizer, have among the shared tensors."""
    found: dict[str, Tensor] = {f"model/{name}": each for name, each in model.named_parameters(remove_duplicate=False)}
    groups = getattr(optimizer, "param_groups", ())
    numbered = enumerate(parameter for group in groups for parameter in group["params"])
    return found | {f"optimizer/{index}": parameter for index, parameter in numbered}


def _parameter_of(name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
    return parameters.get(name if name.startswith("model/") else name.rpartition("/")[0])


def _empty_like(name: str, about: Any, parameter: Tensor | None) -> Tensor:
    """Return an empty tensor to read into, laid out over the ranks like the parameter that it belongs to."""
    dtype = about.properties.dtype
    if parameter is not None and tuple(parameter.shape) == tuple(about.size):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if parameter is not None and (name.startswith("model/") or (_is_sharded(parameter) and len(about.size))):
        raise CheckpointError(f"{name} was saved as {tuple(about.size)}, and is {tuple(parameter.shape)} here.")
    return torch.empty(about.size, dtype=dtype)


def _read_shared(folder: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        found = {name: _empty_like(name, about, _parameter_of(name, parameters)) for name, about in saved.items()}
        load(found, checkpoint_id=str(folder))
    except CheckpointError:
        raise
    except Exception as error:  # torch's own errors have no common class
        raise CheckpointError(f"{folder.parent} cannot be read ({type(error).__name__}: {error}).") from error
    return found


# -- the checkpoint --------------------------------------------------------------------------------------------------


def write_ranks(path: Path, tree: dict[str, Any], model: nn.Module, ranks: OneProcess) -> int:
    """Write the state of this rank, and the shared part with the others; return the bytes of all. All ranks call it.

    Whatever fails on one rank is raised on all. Until all have written, the folder has another name.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    draft = path.with_name(f".{path.name}")
    own: dict[str, Any] = map_tensors(tree, lambda _, tensor: tensor)
    places = list(_shared_places(own["core"], _parameters(model, None)))
    shared = {name: held.pop(key).detach() for name, held, key in places}
    digests: dict[str, int] = {}

    def begin() -> None:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        hooks = (tree["manager"] or {"hooks": {}})["hooks"]
        digests.update({name: rank_digest(state) for name, state in hooks.items()})

    def write_own() -> None:
        checkpoint_file.write(draft / f"rank{ranks.rank}.pt", local_parts(own))

    def write_shared() -> None:
        save(shared, checkpoint_id=str(draft / _SHARED))

    def commit() -> None:
        if ranks.rank == 0:
            checkpoint_file.sync_folder(draft)
            shutil.rmtree(path, ignore_errors=True)
            draft.replace(path)

    ranks.together("beginning a checkpoint", begin)
    said = ranks.gather(digests, "comparing the hooks in a checkpoint")
    differing = sorted(name for name in said[0] if any(one.get(name) != said[0][name] for one in said))
    own["ranks"] = {"count": ranks.size, "differing": differing}
    # One after the other: a rank that cannot write its own part must not leave the others waiting for the shared one.
    ranks.together("writing a checkpoint", write_own)
    ranks.together("writing the shared part of one", write_shared)
    ranks.together("naming a checkpoint", commit)
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def read_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Any,
    home: Callable[[torch.device], torch.device],
    rank: int = 0,
    count: int = 1,
) -> dict[str, Any]:
    """Return the tree of a checkpoint for a rank, with tensors laid out like those of model and optimizer.

    Of one that another number of ranks has saved, it is the tree of rank 0.
    """
    is_of_ranks = path.suffix == SUFFIX
    before = len(list(path.glob("rank*.pt"))) if is_of_ranks else 1
    same = before == count
    parameters = _parameters(model, optimizer)
    file = path / f"rank{rank if same else 0}.pt" if is_of_ranks else path
    tree: dict[str, Any] = checkpoint_file.read(file, home)
    if tree.get("ranks", {}).get("count", before) != before:
        raise CheckpointError(f"{path} is not whole: it has files of {before} ranks.")
    tree = place_parts(tree, parameters.values(), same_ranks=same)
    if not is_of_ranks:
        if any(map(_is_sharded, parameters.values())):
            for name, held, key in _shared_places(tree["core"], parameters):
                held[key] = _spread(held[key], _parameter_of(name, parameters))
        return tree
    core = tree["core"]
    for name, value in _read_shared(path / _SHARED, parameters).items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            core["model"]["tensors"][rest] = value
        elif core["optimizer"] is not None:
            index, _, key = rest.partition("/")
            states = core["optimizer"]["state"].setdefault("state", {})
            states.setdefault(int(index) if index.isdecimal() else index, {})[key] = value
    return tree


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
    if saved["manager"] is not None and differing:
        hooks = saved["manager"]["hooks"]
        saved["manager"]["hooks"] = {name: state for name, state in hooks.items() if name not in differing}
        lost.append(f"the state of {', '.join(differing)}, which was not the same on all ranks")
    return (
        f"The run was saved by {_processes(before)} and goes on with {_processes(now)}: model, optimizer, scheduler "
        f"and hooks go on where they were. What does not carry over: {'; '.join(lost)}."
    )


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"
