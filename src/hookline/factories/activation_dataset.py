"""Read an export as a dataset of torch: one item for each token, with its activation.

Users make an `ActivationDataset` of a folder that ``export`` or `export_activations` has written.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookline.errors import OptionError
from hookline.factories.export_files import index_lines, open_shard
from hookline.messages import counted

__all__ = ["ActivationDataset", "ActivationItem"]


class ActivationItem(TypedDict):
    """One token of an export."""

    activation: Tensor
    """(features)"""
    token: int
    position: int
    request: str
    module: str


class ActivationDataset(Dataset[ActivationItem]):
    """Give the activations of an export, token by token, in the order in which they were written.

    Recipe::

        dataset = ActivationDataset("states", module="model.layers.8")
        for batch in torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2):
            batch["activation"]  # (64, features); also "token", "position", "request", "module"
        activations, tokens = dataset.tensors()  # for train_probe

    The index is read when it is made; activations are read from the files one by one, and not kept. Outputs that were
    not by token are left out.

    Args:
        folder: What an export has written; files that it is still writing are not seen.
        module: Which module, by name or pattern; may be left out if there is one.
        requests: The name of a request or a pattern, or several, to choose among them.
    """

    def __init__(
        self, folder: str | Path, *, module: str | None = None, requests: str | Sequence[str] | None = None
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise OptionError(f"ActivationDataset({str(folder)!r}): there is no such folder.")
        lines = [line for line in index_lines(self.folder) if line["positions"] and line["request"] is not None]
        self.modules = sorted(
            {line["module"] for line in lines if module is None or fnmatchcase(line["module"], module)}
        )
        """The modules that are in it."""
        self._check_modules(module, sorted({line["module"] for line in lines}))
        names = [requests] if isinstance(requests, str) else requests
        self._lines = [
            line
            for line in lines
            if line["module"] in self.modules
            and (names is None or any(fnmatchcase(line["request"], each) for each in names))
        ]
        self._ends = list(accumulate(len(line["positions"]) for line in self._lines))
        self._shards: dict[str, Any] = {}

    def _check_modules(self, asked: str | None, there: list[str]) -> None:
        shown = ", ".join(map(repr, there[:6])) + (", …" if len(there) > 6 else "")
        if not self.modules:
            what = f"no module {asked!r}" if asked is not None else "nothing that is by token and request"
            raise OptionError(f"The export in {self.folder} has {what}; it has {shown or 'no complete file'}.")
        if asked is None and len(self.modules) > 1:
            raise OptionError(f"The export in {self.folder} has several modules; choose by module=: {shown}.")

    def __repr__(self) -> str:
        requests = counted(len({line["request"] for line in self._lines}), "request")
        where = repr(self.modules[0]) if len(self.modules) == 1 else counted(len(self.modules), "module")
        return f"<ActivationDataset of {counted(len(self), 'token')} in {requests}, {where}>"

    def __len__(self) -> int:
        """Return how many tokens there are."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> ActivationItem:
        """Return one token."""
        if isinstance(index, slice):
            raise TypeError("One token at a time: dataset[0]; dataset.tensors() returns all of them.")
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"There are {len(self)} tokens, and none has the index {index}.")
        number = bisect.bisect_right(self._ends, place)
        line = self._lines[number]
        row = place - (self._ends[number] - len(line["positions"]))
        return {
            "activation": self._shard(line["shard"]).get_slice(line["key"])[row],
            "token": line["tokens"][row] if line["tokens"] else -1,
            "position": line["positions"][row],
            "request": line["request"],
            "module": line["module"],
        }

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all activations (tokens, features) and all token ids (tokens), in memory."""
        parts = [self._shard(line["shard"]).get_tensor(line["key"]) for line in self._lines]
        ids = [token for line in self._lines for token in (line["tokens"] or [-1] * len(line["positions"]))]
        return torch.cat(parts) if parts else torch.empty(0), torch.tensor(ids, dtype=torch.int64)

    def _shard(self, name: str) -> Any:
        if name not in self._shards:
            self._shards[name] = open_shard(self.folder / name)
        return self._shards[name]

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: a worker of a DataLoader opens its own."""
        return {**self.__dict__, "_shards": {}}
