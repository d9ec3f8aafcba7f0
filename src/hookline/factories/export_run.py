"""Run a model over sequences of tokens and export the activations of modules: a dataset that can be continued.

Users call `export_activations`; it attaches the hook of ``export`` and says by `BatchRows` whose tokens are in a batch.
`ActivationDataset` reads the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.errors import OptionError
from hookline.factories.batch_rows import BatchRows, serving
from hookline.factories.export_files import written_so_far
from hookline.factories.exporting import export
from hookline.factories.factory_hook import whole
from hookline.sites.attach import attach
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Target

__all__ = ["ExportedRun", "export_activations"]

_NAME: Final = "export_activations"
_QUEUE: Final = 1 << 30
"""Bytes that may wait to be written; the run waits for the disk between batches, so that nothing is dropped."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """What one call of `export_activations` has done."""

    sequences: int
    """Sequences that were run."""
    skipped: int
    """Sequences that were there from an earlier call."""
    written_bytes: int
    """Bytes of activations in the folder, earlier calls included."""
    is_full: bool
    """Whether the budget of bytes has ended it before the last sequence."""


def export_activations(
    model: nn.Module,
    target: Target,
    sequences: Iterable[Sequence[int]],
    *,
    folder: str | Path,
    batch_size: int = 8,
    max_bytes: int | None = None,
    resume: bool = True,
    positions: str = "all",
) -> ExportedRun:
    """Write the outputs of modules for every token of ``sequences`` to a folder.

    Recipe::

        export_activations(model, "role:resid", (tokenizer(text).input_ids for text in texts), folder="states")
        dataset = ActivationDataset("states", module="model.layers.8")

    Sequence n is the request ``"sequence-n"`` of the export. Called again with the same sequences, it continues where
    it was interrupted, by a kill or by the budget: what is complete on disk is not run again, nothing is written twice.

    Args:
        model: A model of ``transformers``, or one that is called as ``model(input_ids=…, attention_mask=…)``; it runs
            in the mode in which it is, without gradients.
        target: Which modules, as in ``attach``; each has to return a row for each token.
        sequences: Token ids; shorter ones of a batch are padded on the left, which a mask hides from the model.
        folder: Where to; it may hold an earlier part.
        batch_size: Sequences in one forward.
        max_bytes: How many bytes of activations the folder may hold in all.
        resume: Continue; with False, a folder that holds an export is an error.
        positions: ``"all"``, or ``"last"``, the last token of each sequence.
    """
    check_model(model)
    whole(_NAME, "batch_size", batch_size)
    earlier = written_so_far(Path(folder))
    if not resume and earlier.bytes:
        raise OptionError(f"{_NAME}: {folder} holds an export already; choose another folder, or resume=True.")
    names = [name for name, _ in select(model, target)]
    hook = export(
        {
            "folder": str(folder),
            "positions": positions,
            "queue_bytes": _QUEUE,
            "max_bytes": max_bytes,
            "resume": True,
        }
    )
    ran = skipped = 0
    try:
        with attach(model, target, hook, observe=True, name=_NAME):
            for rows in _batches(sequences, batch_size):
                due = [row for row in rows if not all(earlier.has_begun(name, row[0]) for name in names)]
                skipped += len(rows) - len(due)
                if due:
                    _run(model, due)
                    hook.wait_until_written()
                    _check_dropped(hook.to_metrics(), batch_size)
                    if hook.is_full:
                        break
                    ran += len(due)
    finally:
        hook.close()
    return ExportedRun(ran, skipped, written_so_far(Path(folder)).bytes, hook.is_full)


def _batches(sequences: Iterable[Sequence[int]], size: int) -> Iterator[list[tuple[str, list[int]]]]:
    """Yield names and token ids of ``size`` sequences at a time."""
    numbered = ((f"sequence-{number}", [int(each) for each in ids]) for number, ids in enumerate(sequences))
    while some := list(islice(numbered, size)):
        yield some


def _check_dropped(metrics: dict[str, float], batch_size: int) -> None:
    if metrics["errors"]:
        raise OSError(f"{_NAME}: the folder cannot be written; see the log of hookline.factories.export.")
    if metrics["dropped"] and not metrics["stopped"]:
        raise OptionError(
            f"{_NAME}: a batch of {batch_size} sequences has more than {_QUEUE} bytes of activations; "
            "choose a smaller batch_size, or fewer modules."
        )


def _run(model: nn.Module, rows: list[tuple[str, list[int]]]) -> None:
    """Run one batch, padded on the left."""
    if not all(ids for _, ids in rows):
        raise OptionError(f"{_NAME}: a sequence has no tokens; leave it out.")
    width = max(len(ids) for _, ids in rows)
    starts = tuple(width - len(ids) for _, ids in rows)
    table = BatchRows(
        tuple(name for name, _ in rows), starts, (0,) * len(rows), tuple(tuple(ids) for _, ids in rows), "prefill"
    )
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    ids = torch.tensor([[0] * start + ids for start, (_, ids) in zip(starts, rows, strict=True)], device=device)
    columns = torch.arange(width, device=device).repeat(len(rows), 1)
    real = columns >= torch.tensor(starts, device=device)[:, None]
    offered: dict[str, Any] = {
        "attention_mask": real.long(),
        "position_ids": (columns - torch.tensor(starts, device=device)[:, None]).clamp_min(0),
        "use_cache": False,
    }
    with torch.no_grad(), serving(table):
        model(input_ids=ids, **dict(_accepted(model, offered)))


def _accepted(model: nn.Module, offered: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    takes = inspect.signature(unwrap(model).forward).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    for key, value in offered.items():
        if key in takes or (takes_all and key != "position_ids"):
            yield key, value
