"""Run a model over sequences of tokens and export the activations of modules: a dataset that can be continued.

Users call `export_activations`; it attaches the hook of ``export`` and says by `Tokens` whose tokens are in a batch.
`ActivationDataset` reads the result.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from hookline.errors import HooklineWarning, OptionError
from hookline.factories.export_files import WrittenSoFar, summary_of, written_so_far
from hookline.factories.exporting import INPUT, Export, ExportInputs, ExportOptions
from hookline.factories.factory_hook import checked
from hookline.factories.served_batch import Positions
from hookline.files import lock_holder, replace_file, take_lock
from hookline.messages import caller_stacklevel
from hookline.observe.tokens import Tokens, serving
from hookline.sites.attach import attach
from hookline.sites.kinds import Kind
from hookline.sites.roles import Layers, with_role
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.handle import HookHandle

__all__ = ["ExportedRun", "export_activations"]

_NAME: Final = "export_activations"
_QUEUE: Final = 1 << 30
"""Bytes that may wait to be written; the run waits for the disk between batches, so that nothing is dropped."""
_WAITING: Final = 16
"""Batches of sequences that may wait for others of their length."""
_LOCK: Final = ".export_activations.lock"
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_MODEL: Final = "model.sha256"
_COMPARED: Final = 64
"""Numbers of each parameter by which weights are known."""
_NamedSequence: TypeAlias = tuple[str, list[int]]
"""The name of the request, and the ids of its tokens."""


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

    Sequence n is the request ``"sequence-n"`` of the export. Called again with the same sequences, it continues where
    it was interrupted, by a kill or by the budget: what is complete on disk is not run again, nothing is written twice.
    A sequence whose tokens or positions on disk are others is an error, and so is a model with other weights: some
    numbers of each parameter are compared.

    Args:
        model: A model of ``transformers``, or one that is called as ``model(input_ids=…, attention_mask=…)``; it runs
            in the mode in which it is, without gradients; where dropout works, with a warning.
        target: Which modules, as in ``attach``; each has to return a row for each token, or be given one.
        sequences: Token ids. Those of one length run together, without padding, so the order on disk may be another.
        folder: Where to; it may hold an earlier part. One run at a time writes to it.
        role: In place of ``target``, the role of the modules in a language model, such as ``"resid"`` or ``"mlp"``; see
            ``attach``.
        inputs: Write what goes into each module in place of what it returns, under its name with ``"/input"``: the main
            tensor of the positional arguments, else ``hidden_states``, else that of the keyword arguments, as it was
            when the call began. ``capture`` keeps both; here a second call with the same folder adds the other side.
        batch_size: At most so many sequences in one forward.
        max_bytes: How many bytes of activations the folder may hold in all; a batch that would pass it ends the run.
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
    options = ExportOptions(
        Path(folder),
        checked(f"{_NAME}: positions", positions, Positions),
        max_bytes=None if max_bytes is None else checked(f"{_NAME}: max_bytes", max_bytes, int),
        inputs=checked(f"{_NAME}: inputs", inputs, bool),
    )
    checked(f"{_NAME}: batch_size", batch_size, int)
    names = [name + INPUT if inputs else name for name, _ in select(model, target)]
    with _only_writer(options.folder):
        earlier = written_so_far(options.folder)
        _compare_weights(model, options.folder, begun=bool(earlier.bytes))
        due = _DueSequences(sequences, names, earlier, only_last=positions == "last")
        hook = (ExportInputs if inputs else Export)(options, queue_bytes=_QUEUE, earlier=earlier)
        ran = 0
        try:
            with _attached(model, target, hook):
                for rows in _batches(due, batch_size):
                    _run(model, rows)
                    hook.wait_until_written()
                    _check_dropped(hook.to_metrics(), batch_size)
                    if hook.is_full:
                        break
                    ran += len(rows)
        finally:
            hook.close()
        return ExportedRun(ran, due.skipped, written_so_far(options.folder).bytes, hook.is_full)


def _attached(model: nn.Module, target: Target, hook: Export) -> HookHandle:
    if isinstance(hook, ExportInputs):
        kind = Kind.FORWARD_PRE
        return attach(model, target, hook.take_arguments, on=kind, with_kwargs=True, observe=True, name=_NAME)
    return attach(model, target, hook, observe=True, name=_NAME)


def _compare_weights(model: nn.Module, folder: Path, *, begun: bool) -> None:
    """Raise if the folder has activations of other weights; else keep what they are known by."""
    path, known_by = folder / _MODEL, _fingerprint(model)
    if not begun or not path.exists():
        replace_file(path, known_by)  # half of it, left by a kill, would be another model
    elif path.read_text() != known_by:
        raise OptionError(
            f"{_NAME}: {folder} holds activations of a model with other weights; choose another folder, or delete it."
        )


def _fingerprint(model: nn.Module) -> str:
    """Return a text that changes with the weights: a hash over names, shapes and some numbers of each parameter."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if type(parameter.data) is torch.Tensor and not parameter.is_meta:  # what is sharded has no numbers of its own
            numbers = parameter.detach().reshape(-1)
            some = numbers[:: max(1, numbers.numel() // _COMPARED)][:_COMPARED]
            some = torch.view_as_real(some) if some.is_complex() else some
            found.update(some.double().cpu().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder for one run: two at once would write every sequence twice."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    lock = take_lock(path)
    if lock is None:
        raise OptionError(
            f"{_NAME}: another run (process {lock_holder(path)}) writes to {folder}; wait for its end, or choose "
            "another folder."
        )
    with lock:
        yield


class _DueSequences:
    """Give the sequences that have to be run, with their names; compare the others with what is on disk."""

    def __init__(
        self, sequences: Iterable[Sequence[int]], modules: list[str], earlier: WrittenSoFar, *, only_last: bool
    ) -> None:
        self._sequences = sequences
        self._modules = modules
        self._earlier = earlier
        self._only_last = only_last
        self.skipped = 0
        """How many are on disk so far."""

    def __iter__(self) -> Iterator[_NamedSequence]:
        """Yield name and token ids."""
        for number, given in enumerate(self._sequences):
            name, ids = f"sequence-{number}", _token_ids(number, given)
            if self._is_there(name, ids):
                self.skipped += 1
            else:
                yield name, ids

    def _is_there(self, name: str, ids: list[int]) -> bool:
        first = len(ids) - 1 if self._only_last else 0
        wanted = summary_of(ids[first:], range(first, len(ids)))
        found = [self._earlier.begun.get((module, name)) for module in self._modules]
        if any(each not in (None, wanted) for each in found):
            raise OptionError(
                f"{_NAME}: {name} is in the folder with other tokens or other positions than now. Give the sequences "
                "and positions= of the first run, or choose another folder."
            )
        return None not in found


def _token_ids(number: int, given: Any) -> list[int]:
    try:
        ids = [operator.index(each) for each in given]
    except TypeError:
        raise OptionError(
            f"{_NAME}: a sequence is a list of whole numbers, the ids of its tokens; sequence {number} is "
            f"{repr(given)[:80]}."
        ) from None
    if not ids:
        raise OptionError(f"{_NAME}: sequence {number} has no tokens; leave it out.")
    return ids


def _batches(due: Iterable[_NamedSequence], size: int) -> Iterator[list[_NamedSequence]]:
    """Yield batches of sequences of one length, which need no padding: not every model can be told what is padding."""
    waiting: dict[int, list[_NamedSequence]] = {}
    count = 0
    for each in due:
        same = waiting.setdefault(len(each[1]), [])
        same.append(each)
        count += 1
        if len(same) < size:
            if count < _WAITING * size:
                continue
            same = next(iter(waiting.values()))  # the longest wait; else memory would grow with the dataset
        count -= len(same)
        yield waiting.pop(len(same[0][1]))
    yield from waiting.values()


def _check_dropped(metrics: dict[str, float], batch_size: int) -> None:
    if metrics["errors"]:
        raise OSError(f"{_NAME}: the folder cannot be written; see the log of hookline.factories.export.")
    if metrics["dropped"] and not metrics["stopped"]:
        raise OptionError(
            f"{_NAME}: a batch of {batch_size} sequences has more than {_QUEUE} bytes of activations; "
            "choose a smaller batch_size, or fewer modules."
        )


def _run(model: nn.Module, rows: list[_NamedSequence]) -> None:
    """Run one batch of sequences of one length."""
    names, sequences = [name for name, _ in rows], [ids for _, ids in rows]
    table = Tokens.padded(names, sequences, [0] * len(rows), "prefill")
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    ids = torch.tensor([ids for _, ids in rows], device=device)
    # No position_ids: models that count from another number than 0, as RoBERTa does, know it themselves.
    offered: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad(), serving(table):
        model(input_ids=ids, **dict(_accepted(model, offered)))


def _accepted(model: nn.Module, offered: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    takes = inspect.signature(unwrap(model).forward).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    for key, value in offered.items():
        if key in takes or takes_all:
            yield key, value
