"""Save a run of several ranks in one folder, and read it with as many ranks, or with another number.

`Saving` calls it through `Checkpoints`. Parameters and the optimizer's tensors, which ranks hold in parts or alike, go
through torch.distributed.checkpoint; everything else (random streams, the place in the data, the state of hooks) is in
one file for each rank. The folder gets its name when all ranks have written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import CheckpointError
from hookline.lifecycle.states import map_tensors
from hookline.training.checkpoint_file import digest, read, write
from hookline.training.sharded_tensors import is_sharded, local_parts, place_parts, same_layout, spread

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.ranks import OneProcess

__all__ = ["SUFFIX", "rank_digest", "read_alone", "read_ranks", "saved_ranks", "write_ranks"]

SUFFIX: Final = ".ranks"
"""How the folder of a checkpoint of several ranks ends."""
_ABOUT: Final = "ranks.json"
_SHARED: Final = "shared"


# -- writing -------------------------------------------------------------------------------------------------------


def write_ranks(path: Path, tree: Mapping[str, Any], model: nn.Module, ranks: OneProcess) -> None:
    """Write the state of this rank, and the shared part with the others; all ranks call it.

    Whatever fails on one rank is raised on all. Until all have written, the folder has another name.
    """
    part = path.with_name(f"{path.name}.part")
    ranks.together("making the folder of a checkpoint", lambda: _make_folder(part) if ranks.rank == 0 else None)
    shared, own = _split(tree, model)
    # One after the other: a rank that cannot write its own part must not leave the others waiting for the shared one.
    ranks.together("writing a checkpoint", lambda: _write_own(part, own, ranks.rank))
    ranks.together("writing the shared part of a checkpoint", lambda: _write_shared(part, shared))
    said = ranks.gather(_hook_digests(tree), "comparing the hooks in a checkpoint")
    differing = sorted(name for name in said[0] if any(one.get(name) != said[0][name] for one in said))
    about = {"ranks": ranks.size, "differing": differing}
    ranks.together("naming a checkpoint", lambda: _commit(part, path, about) if ranks.rank == 0 else None)


def _make_folder(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _write_own(part: Path, own: dict[str, Any], rank: int) -> None:
    write(part / f"rank{rank}.safetensors", own)


def _write_shared(part: Path, shared: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(shared, checkpoint_id=str(part / _SHARED))


def _commit(part: Path, path: Path, about: Mapping[str, Any]) -> None:
    (part / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
    descriptor = os.open(part, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    part.replace(path)


def _split(tree: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what goes through torch.distributed.checkpoint, and the rest of the tree as this rank has it."""
    core = tree["core"]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = core["model"]["tensors"]
    shared = {f"model/{name}": tensor.detach() for name, tensor in tensors.items() if name in parameters}
    buffers = {name: value for name, value in tensors.items() if name not in parameters}
    own_core = {**core, "model": {**core["model"], "tensors": buffers}}
    optimizer = core["optimizer"]
    if optimizer is not None and "state" in optimizer["state"]:
        kept: dict[Any, dict[str, Any]] = {}
        for index, state in optimizer["state"]["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    shared[f"optimizer/{index}/{key}"] = value.detach()
                else:
                    kept.setdefault(index, {})[key] = value
        own_core["optimizer"] = {**optimizer, "state": {**optimizer["state"], "state": kept}}
    own: dict[str, Any] = local_parts({**tree, "core": own_core})
    return shared, own


def _hook_digests(tree: Mapping[str, Any]) -> dict[str, int]:
    hooks = {} if tree["manager"] is None else tree["manager"]["hooks"]
    return {name: rank_digest(state) for name, state in hooks.items()}


def rank_digest(tree: Any) -> int:
    """Return a number that is the same on two ranks only if they hold the same, each on a device of its own."""
    return digest(map_tensors(local_parts(tree), Tensor.cpu))


# -- reading -------------------------------------------------------------------------------------------------------


def saved_ranks(path: Path) -> tuple[int, list[str]]:
    """Return how many ranks wrote a checkpoint, and the hooks whose state was not the same on all of them."""
    if path.suffix != SUFFIX:
        return 1, []
    try:
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
        return int(about["ranks"]), list(about["differing"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error


def read_alone(
    path: Path, model: nn.Module, optimizer: Any, home: Callable[[torch.device], torch.device]
) -> dict[str, Any]:
    """Return the tree that one process has written, with tensors laid out like those of model and optimizer."""
    live = dict(model.named_parameters(remove_duplicate=False))
    found = read(path, home)
    if not any(map(is_sharded, live.values())):
        plain: dict[str, Any] = place_parts(found, ())
        return plain
    tree: dict[str, Any] = place_parts(found, live.values())
    core = tree["core"]
    tensors = core["model"]["tensors"]
    tensors |= {name: spread(value, live.get(name)) for name, value in tensors.items()}
    if core["optimizer"] is not None:
        indexed = _by_index(optimizer)
        for index, state in core["optimizer"]["state"].get("state", {}).items():
            state |= {
                key: spread(value, indexed.get(index)) for key, value in state.items() if isinstance(value, Tensor)
            }
    return tree


def read_ranks(
    path: Path,
    model: nn.Module,
    optimizer: Any,
    rank: int,
    home: Callable[[torch.device], torch.device],
    *,
    same_ranks: bool,
) -> dict[str, Any]:
    """Return the tree of a rank, with the shared part read into tensors like those of model and optimizer."""
    found = read(path / f"rank{rank}.safetensors", home)
    live = dict(model.named_parameters(remove_duplicate=False))
    tree: dict[str, Any] = place_parts(found, live.values(), same_ranks=same_ranks)
    shared = _read_shared(path, live, optimizer)
    core = tree["core"]
    core["model"]["tensors"] |= {
        name.removeprefix("model/"): value for name, value in shared.items() if name.startswith("model/")
    }
    if core["optimizer"] is not None:
        states = core["optimizer"]["state"].setdefault("state", {})
        for name, value in shared.items():
            kind, _, rest = name.partition("/")
            index, _, key = rest.partition("/")
            if kind == "optimizer":
                states.setdefault(int(index) if index.isdecimal() else index, {})[key] = value
    return tree


def _read_shared(path: Path, live: Mapping[str, Tensor], optimizer: Any) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        saved = FileSystemReader(str(path / _SHARED)).read_metadata().state_dict_metadata
        indexed = _by_index(optimizer)
        templates = {name: _template(name, about, live, indexed) for name, about in saved.items()}
        load(templates, checkpoint_id=str(path / _SHARED))
    except Exception as error:  # torch's own errors have no common class
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    return templates


def _by_index(optimizer: Any) -> dict[int, Tensor]:
    """Return the parameters of an optimizer by their numbers in its state."""
    groups = getattr(optimizer, "param_groups", ())
    return dict(enumerate(parameter for group in groups for parameter in group["params"]))


def _template(name: str, about: Any, live: Mapping[str, Tensor], indexed: Mapping[int, Tensor]) -> Tensor:
    """Return an empty tensor to read into, laid out over the ranks like the parameter that it belongs to."""
    kind, _, rest = name.partition("/")
    index = rest.partition("/")[0]
    parameter = live.get(rest) if kind == "model" else indexed.get(int(index) if index.isdecimal() else -1)
    dtype = about.properties.dtype
    if parameter is not None and tuple(parameter.shape) == tuple(about.size):
        return same_layout(parameter, dtype)
    if parameter is not None and (kind == "model" or (is_sharded(parameter) and len(about.size))):
        raise CheckpointError(f"{name} was saved as {tuple(about.size)}, and is {tuple(parameter.shape)} here.")
    return torch.empty(about.size, dtype=dtype)
