"""Run a model over sequences of tokens and export the activations of modules, as a dataset.

Users call `export_activations`; it says by `Tokens` whose tokens are in a batch, and writes the files of ``export``
after each. `ActivationDataset` reads the result.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from hookline.errors import HooklineWarning, OptionError
from hookline.factories.export_files import ExportItem, Shards, index_lines
from hookline.factories.exporting import INPUT, Export, ExportOptions, ExportSink
from hookline.factories.factory_hook import checked
from hookline.factories.served_batch import Positions
from hookline.messages import caller_stacklevel
from hookline.observe.patch.parts import find_main_input
from hookline.observe.tokens import Tokens, serving
from hookline.sites.attach import attach
from hookline.sites.kinds import Kind
from hookline.sites.roles import Layers, with_role
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.handle import HookHandle
    from hookline.sites.site_info import Site

__all__ = ["ExportedRun", "export_activations"]

_NAME: Final = "export_activations"
_TOGETHER: Final = 16
"""Batches of sequences that are sorted by length together."""
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NamedSequence: TypeAlias = tuple[str, list[int]]
"""The name of the request, and the ids of its tokens."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """What one call of `export_activations` has done."""

    sequences: int
    """Sequences that were run and written."""
    written_bytes: int
    """Bytes of their activations."""
    is_full: bool
    """Whether the budget of bytes has ended it before the last sequence."""


def export_activations(
    model: nn.Module,
    target: Target = None,
    sequences: Iterable[Sequence[int]] | None = None,
    *,
    folder: str | Path,
    role: str | None = None,
    layer: Layers = None,
    inputs: bool = False,
    batch_size: int = 8,
    max_bytes: int | None = None,
    positions: str = "all",
) -> ExportedRun:
    """Write the outputs of modules, or their ``inputs``, for every token of ``sequences`` to a folder.

    Recipe::

        sequences = [tokenizer(text).input_ids for text in texts]
        export_activations(model, role="resid", sequences=sequences, folder="states")
        dataset = ActivationDataset("states", module="model.layers.8")
        export_activations(model, "model.layers.8.self_attn.o_proj", sequences, folder="heads", inputs=True)
        dataset = ActivationDataset("heads", module="model.layers.8.self_attn.o_proj/input")

    Sequence n is the request ``"sequence-n"`` of the export. Modules that the folder has from an earlier call are an
    error.

    Args:
        model: A model of ``transformers``, or one that is called as ``model(input_ids=…, attention_mask=…)``; it runs
            in the mode in which it is, without gradients; where dropout works, with a warning.
        target: Which modules, as in ``attach``; each has to return a row for each token, or be given one.
        sequences: Token ids. Those of one length run together, without padding, so the order on disk may be another.
        folder: Where to.
        role: In place of ``target``, the role of the modules in a language model, such as ``"resid"`` or ``"mlp"``; see
            ``attach``.
        inputs: Write what goes into each module in place of what it returns, under its name with ``"/input"``: the main
            tensor of the positional arguments, else ``hidden_states``, else that of the keyword arguments, as it was
            when the call began. ``capture`` keeps both; here a second call with the same folder adds the other side.
        batch_size: At most so many sequences in one forward.
        max_bytes: How many bytes of activations to write at most; a batch that would pass it ends the run.
        positions: ``"all"``, or ``"last"``, the last token of each sequence.
    """
    check_model(model, target)
    target = with_role(target, role, layer=layer)
    if sequences is None:
        raise OptionError(f"{_NAME} needs sequences= of token ids to run the model on: [[15, 3, 8], [4, 1]].")
    if any(isinstance(module, _DROPOUTS) and module.training and module.p for module in model.modules()):
        warnings.warn(
            f"{_NAME}: the model is in training mode, and dropout changes what is exported; call model.eval() first.",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )
    checked(f"{_NAME}: batch_size", batch_size, int)
    checked(f"{_NAME}: positions", positions, Positions)
    limit = float("inf") if max_bytes is None else checked(f"{_NAME}: max_bytes", max_bytes, int)
    options = ExportOptions(Path(folder), positions, inputs=inputs)  # type: ignore[arg-type]
    names = [name or type(module).__name__ for name, module in select(model, target)]  # as the export calls them
    _check_new(options.folder, [name + INPUT if inputs else name for name in names])
    batch, ran, is_full, shards = _Batch(), 0, False, Shards(options.folder)
    try:
        with _attached(model, target, options, batch):
            for rows in _batches(_named(sequences), batch_size):
                batch.items.clear()
                _run(model, rows)
                is_full = shards.bytes + shards.size + sum(item.tensor.nbytes for item in batch.items) > limit
                if is_full:
                    break
                for item in batch.items:
                    shards.add(item)
                ran += len(rows)
        shards.complete()
    except BaseException:  # what has run until then is kept
        with contextlib.suppress(OSError):
            shards.complete()
        raise
    return ExportedRun(ran, shards.bytes, is_full)


def _check_new(folder: Path, modules: list[str]) -> None:
    there = {line["module"] for line in index_lines(folder)} if folder.is_dir() else set()
    if both := sorted(there.intersection(modules)):
        raise OptionError(f"{_NAME}: {folder} has {', '.join(both)} from an earlier call; choose another folder.")


class _Batch(ExportSink):
    """Hold what modules return, or are given, in the forward of one batch."""

    def __init__(self) -> None:
        self.items: list[ExportItem] = []

    def take(self, item: ExportItem) -> None:
        """Copy an output to the CPU, and hold it."""
        self.items.append(replace(item, tensor=item.tensor.to("cpu", copy=True)))


def _attached(model: nn.Module, target: Target, options: ExportOptions, batch: _Batch) -> HookHandle:
    hook = Export(options, batch)
    if not options.inputs:
        return attach(model, target, hook, observe=True, name=_NAME)

    def take_inputs(module: nn.Module, inputs: Any, named: dict[str, Any], *, site: Site) -> None:
        hook.take(module, site, inputs, find_main_input(inputs, named))

    return attach(model, target, take_inputs, on=Kind.FORWARD_PRE, with_kwargs=True, observe=True, name=_NAME)


def _named(sequences: Iterable[Sequence[int]]) -> Iterator[_NamedSequence]:
    for number, given in enumerate(sequences):
        try:
            ids = [operator.index(each) for each in given]
        except TypeError:
            ids = []
        if not ids:
            raise OptionError(
                f"{_NAME}: a sequence is a list of whole numbers, the ids of its tokens; sequence {number} is "
                f"{repr(given)[:80]}."
            )
        yield f"sequence-{number}", ids


def _batches(sequences: Iterable[_NamedSequence], size: int) -> Iterator[list[_NamedSequence]]:
    """Yield batches of sequences of one length, which need no padding: not every model can be told what is padding."""
    rest = iter(sequences)
    while some := sorted(itertools.islice(rest, _TOGETHER * size), key=lambda each: len(each[1])):
        for _, same in itertools.groupby(some, key=lambda each: len(each[1])):
            while batch := list(itertools.islice(same, size)):
                yield batch


def _run(model: nn.Module, rows: list[_NamedSequence]) -> None:
    """Run one batch of sequences of one length."""
    names, sequences = [name for name, _ in rows], [ids for _, ids in rows]
    table = Tokens.padded(names, sequences, [0] * len(rows), "prefill")
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    ids = torch.tensor([ids for _, ids in rows], device=device)
    # No position_ids: models that count from another number than 0, as RoBERTa does, know it themselves.
    offered: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    takes = inspect.signature(unwrap(model).forward).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    with torch.no_grad(), serving(table):
        model(input_ids=ids, **{key: value for key, value in offered.items() if takes_all or key in takes})
