"""``export``: write the outputs or inputs of modules to safetensors files, by request and token; and read them.

Specs and users make it. The hook makes an item of each output (`item_of`) and copies it into a queue of limited bytes,
which a thread empties into `Shards`; `served_batch` says whose tokens they are. The forward waits neither for the disk
nor for the device. A shard is held in memory until it is written as a whole, and only then its lines go into the index:
whatever kills the process, every file is whole and every line is true. Nothing is pickled, and nothing that is read is
run. Users call `export_activations`, which runs a model over sequences of tokens and writes the same files after each
batch; `read_export`, or an `ActivationDataset`, reads them.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import itertools
import json
import logging
import operator
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hookline.error_policy import warn_user
from hookline.errors import OptionError
from hookline.factories.factory_hook import ByModule, Observer, checked, read_options, tried_by
from hookline.factories.served_batch import Positions, Stage, measurable, output_tensor, running
from hookline.files import replace_file
from hookline.observe.host_values import sent_to_host
from hookline.observe.patching import find_main_input
from hookline.observe.tokens import ChosenTokens, Tokens, serving
from hookline.records.log import dumps
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.kinds import Kind
from hookline.sites.targets import select
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.sites.handle import HookHandle
    from hookline.sites.hook_at_site import Site

logger = logging.getLogger("hookline.factories.export")

INPUT: Final = "/input"
"""What an export adds to the name of a module whose inputs it writes: a folder may have both sides of one."""
_QUEUE_BYTES: Final = 256 << 20
"""Bytes that may wait to be written; what does not fit is dropped and counted."""
_FLUSH_SECONDS: Final = 5.0
"""After how long a smaller shard is completed."""
_LOOK: Final = 0.25
"""Seconds between two checks whether a shard has been held for too long."""
_NAP: Final = 0.03
"""Seconds that the thread waits for more outputs: a thread that wakes up, or returns from the disk, takes the
interpreter from the forward. With one that did so for each output, the export of one layer made a decoding forward on
an H200 take 9 % longer."""
_INDEX: Final = "index-{number:03d}.jsonl"
_SUFFIX: Final = ".safetensors"
_SHARD: Final = "export-{number:03d}-{count:06d}" + _SUFFIX
SHARD_BYTES: Final = 64 << 20
"""How large a shard grows."""
_DTYPES: Final = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


@dataclass(frozen=True)
class ExportOptions:
    """The config of ``export``."""

    folder: Path
    positions: Positions = "all"
    phase: Stage = "both"
    max_bytes: int | None = None
    add_residual: bool = False
    inputs: bool = False

    def __post_init__(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(f"export: {self.folder} is a file, and folder has to be a folder.")
        if self.inputs and self.add_residual:
            raise OptionError("export: add_residual is about what a module returns, and inputs about what it gets.")


@tried_by()
def export(config: Mapping[str, Any] | None = None) -> Export:
    """Make a hook that writes outputs to safetensors files in a folder; no forward waits for it.

    Recipe::

        hook = export({"folder": "states", "max_bytes": 1_000_000_000})
        with hookline.attach(model, "model.layers.8", hook):
            model(input_ids)
        hook.close()
        for record in read_export("states"):
            print(record.module, record.request, record.positions, record.tensor.shape)

    Args:
        config: ``folder``: where to; the only option that has to be given. ``positions``: ``"all"``, or ``"last"``, the
            last token of each sequence in each forward. ``phase``: ``"prefill"`` or ``"decode"`` of a served model, for
            one of them alone. ``max_bytes``: how much may be written in all; then it stops, and says so once.
            ``add_residual``: of an output that is a pair of tensors of one shape, as SGLang's layers give, write the
            sum. ``inputs``: write what goes into the modules in place of what comes out, under the name
            ``"layers.8/input"``: the main tensor of the positional arguments. The hook is then one for
            ``on="forward_pre"``, as a module may change its input in place.

    At most 256 MiB wait to be written; what does not fit is dropped and counted. A file is complete at 64 MiB, or after
    five seconds.
    """
    options = read_options("export", ExportOptions, config)
    return (ExportInputs if options.inputs else Export)(options, ExportQueue(options))


class Export(Observer):
    """Hand the outputs of all modules that it is on to a queue, with whose tokens they have."""

    name = "export"

    def __init__(self, options: ExportOptions, waiting: ExportQueue) -> None:
        self._options = options
        self._queue = waiting
        side = INPUT if options.inputs else ""
        self._calls = ByModule(lambda name: (name + side, itertools.count()))
        self._unread = 0
        self._finalizer = weakref.finalize(self, waiting.close)  # the process ends, or the hook is deleted

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Take the output of a module."""
        self.take(module, site, inputs, output_tensor(output, self._options.add_residual))

    def take(self, module: nn.Module, site: Site | None, inputs: Any, taken: Tensor | None) -> None:
        """Hand over what a module returns or gets; its ``inputs`` may say whose tokens these are."""
        if _torch.in_recomputation():  # it was taken the first time
            return
        (name, calls), tokens, options = self._calls.of(module, site), running(inputs), self._options
        call = next(calls)
        tensor = measurable(taken)
        if tensor is None or not can_store(tensor):
            self._unread += 1
        elif tokens is None and options.phase != "both":
            self.log_unknown("phase")
        else:
            item = item_of(name, call, tensor, tokens, last=options.positions == "last", stage=options.phase)
            if item is not None:
                self.store(item)

    def store(self, item: ExportItem) -> None:
        """Take an item, whose tensors are those of the forward."""
        self._queue.take(item)

    def to_metrics(self) -> dict[str, float]:
        """Return what was written, waits and was dropped; ``unread`` had no numbers, or none that can be stored."""
        return self._queue.to_metrics() | {"unread": float(self._unread)}

    def close(self) -> None:
        """Write what waits, and complete the last file."""
        self._finalizer()


class ExportInputs(Export):
    """Export what goes into the modules; a hook before the forward, which may change its inputs in place."""

    def __call__(self, module: nn.Module, inputs: Any, *, site: Site | None = None) -> None:  # type: ignore[override]
        """Take the main tensor of the positional arguments."""
        self.take(module, site, inputs, find_main_input(inputs, {}))


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
for _hook in (Export.__call__, ExportInputs.__call__):
    _torch.leave_to_python(_hook)


# -- between the forward and the disk --------------------------------------------------------------------------


class ExportQueue:
    """Write outputs from a thread of its own, and count them."""

    def __init__(self, options: ExportOptions, room: int = _QUEUE_BYTES) -> None:
        self._max_bytes, self._room = options.max_bytes, room
        self._shards = Shards(options.folder)
        self._items: queue.SimpleQueue[ExportItem | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        """Held for counting alone, never while something is written."""
        self._accepted = self._queued = self._dropped = self._errors = 0
        self._stopped = ""
        """Why nothing more is taken, if that is so."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        """A forked process has no thread, and its locks may stay locked."""

    def take(self, item: ExportItem) -> None:
        """Queue an output to be written; count it as dropped if there is no room."""
        size = item.tensor.nbytes
        if os.getpid() != self._process:
            return
        with self._lock:
            is_dropped = bool(self._stopped) or self._queued + size > self._room
            if not is_dropped and self._max_bytes is not None and self._accepted + size > self._max_bytes:
                is_dropped, self._stopped = True, f"more than max_bytes ({self._max_bytes}) is asked for"
                logger.warning("Export stops: %s; %d bytes were taken", self._stopped, self._accepted)
            if is_dropped:
                self._dropped += 1
                return
            self._accepted += size
            self._queued += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hookline-export", daemon=True)
                self._thread.start()
        self._items.put(copied(item))

    def _work(self) -> None:
        is_over = False
        while not is_over:
            items = self._next_items()
            is_over = None in items
            for item in items:
                if item is not None:
                    self._write(item)
                    with self._lock:
                        self._queued -= item.tensor.nbytes
            if is_over or self._shards.age > _FLUSH_SECONDS:
                self._write(None)

    def _next_items(self) -> list[ExportItem | None]:
        """Return waiting items, after a short wait for more; None comes after the last."""
        found: list[ExportItem | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._items.get(timeout=_LOOK))
            self._is_closing.wait(_NAP)
            while True:
                found.append(self._items.get_nowait())
        return found

    def _write(self, item: ExportItem | None) -> None:
        """Write an item, or with None what is held; when that fails, the export ends, and the run goes on."""
        if self._errors:
            self._dropped += item is not None
            return
        try:
            if item is None:
                self._shards.complete()
                return
            if item.ready is not None:
                item.ready.synchronize()
            with torch.inference_mode(False), torch.no_grad():
                self._shards.add(item)
        except Exception as error:
            logger.error("Export stops, and the run continues: %s: %s", type(error).__name__, error)
            with self._lock:
                self._stopped, self._errors = str(error), 1
                self._dropped += self._shards.outputs

    def close(self, timeout: float = 60.0) -> None:
        """Write all that was taken, and take no more; may be called again."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._is_closing.set()
            self._items.put(None)
            thread.join(timeout)
            if thread.is_alive():
                logger.error("Export did not end in %g s; %d bytes still wait to be written", timeout, self._queued)

    def to_metrics(self) -> dict[str, float]:
        """Return the counts so far."""
        with self._lock:
            counts = {
                "written_bytes": self._shards.bytes,
                "written_tensors": self._shards.tensors,
                "queued_bytes": self._queued,
                "dropped": self._dropped,
                "errors": self._errors,
                "stopped": bool(self._stopped),
            }
        return {name: float(value) for name, value in counts.items()}


# -- what is written of an output --------------------------------------------------------------------------------


def can_store(tensor: Tensor) -> bool:
    """Return whether the format knows the tensor's dtype."""
    return tensor.dtype in _DTYPES


@dataclass(slots=True)
class ExportItem:
    """One output that is to be written: whole, or the entries of some tokens."""

    module: str
    call: int
    tensor: Tensor
    chosen: ChosenTokens | None = None
    """Whose entries it has, one after the other; None if it is the whole output."""
    ready: Any = None
    """The event after which a copy from a GPU is complete."""


def item_of(
    module: str, call: int, tensor: Tensor, tokens: Tokens | None, *, last: bool = False, stage: str = "both"
) -> ExportItem | None:
    """Return what to write of an output: the entries of the chosen tokens; None if it has none of them."""
    if tokens is None:  # of (batch, sequence, features), padded on the left, the last column
        return ExportItem(module, call, tensor[:, -1:] if last and tensor.dim() == 3 else tensor)
    chosen = tokens.choose(last=last, stage=stage)
    if not chosen.rows:
        return None
    entries = chosen.pick(tensor)
    if entries is not None:
        return ExportItem(module, call, entries, chosen)
    return ExportItem(module, call, tensor) if stage in ("both", tokens.phase) else None


def copied(item: ExportItem) -> ExportItem:
    """Return the item with copies of its tensors on the host, complete once ``ready`` has happened."""
    tensor, chosen, ready = _copy_on_host(item.tensor), item.chosen, None
    if chosen is not None:  # engines use their buffers again
        chosen = replace(chosen, tokens=chosen.tokens.with_tensors(_copy_on_host))
    if item.tensor.is_cuda:
        make: Any = torch.cuda.Event
        ready = make(blocking=True)  # whoever waits for it does not spin
        ready.record(torch.cuda.current_stream(item.tensor.device))
    return replace(item, tensor=tensor, chosen=chosen, ready=ready)


def _copy_on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return sent_to_host(value) if value.is_cuda else value.to("cpu", copy=True)


_Piece: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A tensor, and what the index says of it."""


def _pieces_of(item: ExportItem) -> Iterator[_Piece]:
    """Yield the pieces of an output: one for each request, or the whole."""
    line = {"module": item.module, "call": item.call, "request": None, "tokens": [], "positions": [], "phase": None}
    chosen = item.chosen
    if chosen is None:
        yield item.tensor, line
        return
    tokens, begin = chosen.tokens, 0
    for row in chosen.rows:
        of_request = {**line, "request": tokens.requests[row] or None, "phase": tokens.phases[row]}
        own = tokens.of_request(row)
        first, length = own.firsts[0], own.lengths[0]
        positions = _numbers(own.positions) if first is None else list(range(first, first + length))
        skipped = length - 1 if chosen.last else 0
        end = begin + length - skipped
        told = {"tokens": _numbers(own.ids)[skipped:], "positions": positions[skipped:]}
        yield item.tensor[begin:end], of_request | told
        begin = end


def _numbers(values: Tensor | Sequence[int] | None) -> list[int]:
    return [int(value) for value in (values.flatten().tolist() if isinstance(values, Tensor) else values or ())]


# -- writing ---------------------------------------------------------------------------------------------------------


class Shards:
    """Write the files of one hook into a folder, which several hooks and processes may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: Path | None = None
        self._number = self._count = 0
        self.tensors = self.bytes = 0
        """What is in complete files."""
        self._begin()

    def _begin(self) -> None:
        self._held: list[_Piece] = []
        self.outputs = self.size = 0
        """The items that are held, and the bytes of their tensors."""
        self._since = float("inf")

    @property
    def age(self) -> float:
        """Return for how many seconds tensors have been held; less than 0 without any."""
        return time.monotonic() - self._since

    def add(self, item: ExportItem) -> None:
        """Hold the tensors of an item, which are on the CPU, until their file is written: at its full size, now."""
        self.outputs += 1
        self._since = min(self._since, time.monotonic())
        for tensor, line in _pieces_of(item):
            # A copy: the format refuses tensors that share memory, as the rows of a batch do.
            self._held.append((tensor.clone(memory_format=torch.contiguous_format), line))
            self.size += tensor.nbytes
        if self.size >= SHARD_BYTES:
            self.complete()

    def complete(self) -> None:
        """Write a file of what is held, and its lines to the index."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._held:
            return
        if self._index is None:
            self._number, self._index = _claim_index(self._folder)
        name = _SHARD.format(number=self._number, count=self._count)
        keys = [f"{line['module']}#{place}" for place, (_, line) in enumerate(self._held)]
        tensors = dict(zip(keys, (tensor for tensor, _ in self._held), strict=True))
        try:
            replace_file(self._folder / name, lambda draft: save_file(tensors, draft))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        lines = [dumps({**line, "shard": name, "key": key}) for key, (_, line) in zip(keys, self._held, strict=True)]
        with self._index.open("ab") as index:  # all at once: whoever is interrupted writes the file again
            index.write(b"".join(line + b"\n" for line in lines))
        self._count += 1
        self.tensors += len(self._held)
        self.bytes += self.size
        self._begin()


def _claim_index(folder: Path) -> tuple[int, Path]:
    """Return a number that no other hook has in this folder, and its index, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        index = folder / _INDEX.format(number=number)
        try:
            index.touch(exist_ok=False)
        except FileExistsError:
            continue
        break
    return number, index


# -- a run over sequences --------------------------------------------------------------------------------------------

_NAME: Final = "export_activations"
_TOGETHER: Final = 16
"""Batches of sequences that are sorted by length together."""
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NamedSequence: TypeAlias = tuple[str, list[int]]
"""The name of the request, and the ids of its tokens."""


def export_activations(
    model: nn.Module,
    target: Target,
    sequences: Iterable[Sequence[int]],
    *,
    folder: str | Path,
    inputs: bool = False,
    batch_size: int = 8,
) -> int:
    """Write the outputs of modules, or their ``inputs``, for every token of ``sequences`` to a folder.

    Recipe::

        sequences = [tokenizer(text).input_ids for text in texts]
        export_activations(model, "role:resid", sequences, folder="states")
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
        inputs: Write what goes into each module in place of what it returns, under its name with ``"/input"``: the main
            tensor of the positional arguments, else ``hidden_states``, else that of the keyword arguments, as it was
            when the call began. ``capture`` keeps both; here a second call with the same folder adds the other side.
        batch_size: At most so many sequences in one forward.

    Returns:
        How many sequences were run and written.
    """
    if any(isinstance(module, _DROPOUTS) and module.training and module.p for module in model.modules()):
        warn_user(f"{_NAME}: the model is in training mode, where dropout works. Next: call model.eval() first.")
    checked(f"{_NAME}: batch_size", batch_size, int)
    options = ExportOptions(Path(folder), inputs=inputs)
    names = [name or type(module).__name__ for name, module in select(model, target)]  # as the export calls them
    _check_new(options.folder, [name + INPUT if inputs else name for name in names])
    hook, ran, shards = _BatchExport(options), 0, Shards(options.folder)
    try:
        with _attached(model, target, hook, inputs=inputs):
            for rows in _batches(_named(sequences), batch_size):
                hook.items.clear()
                _run(model, rows)
                for item in hook.items:
                    shards.add(item)
                ran += len(rows)
    finally:  # what has run until then is kept
        shards.complete()
    return ran


def _check_new(folder: Path, modules: list[str]) -> None:
    there = {line["module"] for line in index_lines(folder)} if folder.is_dir() else set()
    if both := sorted(there.intersection(modules)):
        raise OptionError(f"{_NAME}: {folder} has {', '.join(both)} from an earlier call; choose another folder.")


class _BatchExport(Export):
    """Hold what modules return, or are given, in the forward of one batch."""

    def __init__(self, options: ExportOptions) -> None:
        super().__init__(options, ExportQueue(options))
        self.items: list[ExportItem] = []

    def store(self, item: ExportItem) -> None:
        """Copy an item to the CPU, and hold it."""
        self.items.append(replace(item, tensor=item.tensor.to("cpu", copy=True)))


def _attached(model: nn.Module, target: Target, hook: Export, *, inputs: bool) -> HookHandle:
    if not inputs:
        return attach(model, target, hook, observe=True, name=_NAME)

    def take_inputs(module: nn.Module, inputs: Any, named: dict[str, Any], *, site: Site) -> None:
        hook.take(module, site, inputs, find_main_input(inputs, named))

    return attach(model, target, take_inputs, on=Kind.FORWARD_PRE, with_kwargs=True, observe=True, name=_NAME)


def _named(sequences: Iterable[Sequence[int]]) -> Iterator[_NamedSequence]:
    for number, given in enumerate(sequences):
        ids = [operator.index(each) for each in given]
        if not ids:
            raise OptionError(f"{_NAME}: a sequence is a list of token ids, and sequence {number} is empty.")
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


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One exported tensor."""

    module: str
    call: int
    """Which call of the module it is from, from 0."""
    request: str | None
    """Which request it is of; None if that is unknown, and then the tensor is all of the output."""
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    """Of these tokens in their sequence."""
    phase: str | None
    """``"prefill"``, ``"decode"``, or None."""
    tensor: Tensor


def read_export(folder: str | Path) -> Iterator[ExportRecord]:
    """Yield all tensors of an export, file by file, in the order they were written.

    Recipe::

        for record in read_export("states"):
            print(record.module, record.request, record.positions, record.tensor.shape)

    Only complete files are read: one that a killed process has left half-written has another name.
    """
    shard: Any = None
    name = ""
    for line in index_lines(Path(folder)):
        if line["shard"] != name:
            name = line["shard"]
            shard = _open_shard(Path(folder) / name)
        told = {key: line[key] for key in ("module", "call", "request", "phase")}
        tokens, positions = tuple(line["tokens"]), tuple(line["positions"])
        yield ExportRecord(**told, tokens=tokens, positions=positions, tensor=shard.get_tensor(line["key"]))


def index_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the indices of a folder say of each tensor, in the order they were written."""
    if not folder.is_dir():
        raise OptionError(f"{str(folder)!r} holds no export: there is no such folder.")
    for index in sorted(folder.glob("index-*.jsonl")):
        for text in index.read_bytes().splitlines(keepends=True):
            if not text.endswith(b"\n"):  # it is still being written, or never will be
                continue
            line = json.loads(text)
            if line["shard"] != Path(line["shard"]).name:
                raise OptionError(f"{index} names {line['shard']!r}, which is no file of its folder.")
            yield line


def _open_shard(shard: Path) -> Any:
    """Open a complete file; raise if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(shard), framework="pt")
    except (OSError, SafetensorError) as error:
        raise OptionError(f"read_export: {shard} cannot be read, though it was complete once ({error}).") from None


# -- a dataset of torch --------------------------------------------------------------------------------------------


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
    """

    def __init__(self, folder: str | Path, *, module: str | None = None) -> None:
        self.folder = Path(folder)
        lines = [line for line in index_lines(self.folder) if line["positions"] and line["request"] is not None]
        there = sorted({line["module"] for line in lines})
        self.modules = [name for name in there if module is None or fnmatchcase(name, module)]
        """The modules that are in it."""
        if not self.modules or (module is None and len(self.modules) > 1):
            shown = ", ".join(map(repr, there[:6])) + (", …" if len(there) > 6 else "")
            raise OptionError(
                f"The export in {self.folder} has several modules, or not the one that is asked for; choose one by "
                f"module=: it has {shown or 'nothing that is by token and request'}."
            )
        self._lines = [line for line in lines if line["module"] in self.modules]
        self._ends = list(accumulate(len(line["positions"]) for line in self._lines))
        self._shards: dict[str, Any] = {}

    def __len__(self) -> int:
        """Return how many tokens there are."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> ActivationItem:
        """Return one token."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
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
            self._shards[name] = _open_shard(self.folder / name)
        return self._shards[name]

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: a worker of a DataLoader opens its own."""
        return {**self.__dict__, "_shards": {}}
