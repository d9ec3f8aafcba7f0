"""Dump tensors as SGLang does: by name and tags (its general dumper, `dumper`), or of every leaf of a model.

Users call ``dumper.dump("q", q, dims="b s h")``. It filters by tags, numbers the dumps, and writes files or hands them
to ``capture_output``. A file is ``DIR/EXPERIMENT/step=0___rank=0___dump_index=1___name=x.pt`` and holds ``{"value",
"meta"}``; read it with ``torch.load(path, weights_only=True)``.

Servers call `register_forward_hook_for_model`, which attaches observers and returns a `TensorDumper`: each forward of
the model is a pass, whose file has what every leaf gives out, the top module and ``lm_head`` included.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import logging
import os
import random
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote

import torch
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hookline.distributed.ranks import gather_objects, rank_count, this_rank
from hookline.errors import NoMatchError, OptionError, ScopeError
from hookline.files import replace_file
from hookline.messages import nearest_names, type_name
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import Site
from hookline.sites.tensors import attach_tensor
from hookline.sites.wrappers import clean_modules, unwrap
from hookline.specs.hook_spec import option_errors
from hookline.tree import children, leaves, to_builtins

logger = logging.getLogger(__name__)

_NO_TAGS: Final[Mapping[str, Any]] = {}
_LONGEST: Final = 240
"""Bytes of a file's name; most file systems take 255."""

# -- filters -------------------------------------------------------------------------------------------------------

_NODES: Final = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop, ast.UnaryOp),
    *(ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mod, ast.FloorDiv, ast.Tuple, ast.List, ast.Set, ast.Call),
)
"""What a filter may be made of: nothing that reaches into an object, or runs for long."""
_FUNCTIONS: Final[dict[str, Callable[[str, Any], bool]]] = {
    "search": lambda pattern, text: re.search(pattern, "" if text is None else str(text)) is not None,
    "match": lambda pattern, text: re.match(pattern, "" if text is None else str(text)) is not None,
}


class _Names(dict[str, Any]):
    """Tags and functions by name; a tag that is not there is None."""

    def __missing__(self, name: str) -> Any:
        return _FUNCTIONS.get(name)


@functools.cache
def _compiled(text: str) -> CodeType:
    """Return the code of a filter; raise `OptionError` for anything but an expression over tags."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise OptionError(f"The filter {text!r} is no expression: {error.msg}.") from error
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Call) and ast.unparse(node.func) not in _FUNCTIONS):
            shown = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
            raise OptionError(
                f"The filter {text!r} has {shown!r}; it takes names, constants, comparisons, and, or, not, + - % //, "
                "lists, and search(pattern, name), match(pattern, name)."
            )
    return compile(tree, "<filter>", "eval")


def _checked_filter(text: str) -> str:
    _compiled(text)
    return text


# -- settings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class DumperConfig:
    """The settings of the general dumper."""

    enable: bool = False
    """Whether anything is dumped."""
    filter: Annotated[str, AfterValidator(_checked_filter)] | None = None
    """An expression over the tags, such as ``layer_id == 3 and search('mlp', name)``; None: all."""
    dir: str = Field(default_factory=lambda: str(Path(tempfile.gettempdir()) / "dumper"))
    """The folder of all experiments."""
    enable_output_file: bool = True
    enable_output_console: bool = True
    """Whether a line of the log (level INFO) says what was dumped."""
    enable_value: bool = True
    enable_grad: bool = False
    """Whether the gradient of a dumped tensor is dumped when it arrives."""
    exp_name: str | None = None
    """The folder of this experiment in ``dir``; None: by the time, one for all ranks."""
    non_intrusive_mode: Literal["core", "all", "off"] = "core"
    """What hooks on modules dump: ``core`` (well-known inputs of the model), ``all``, ``off``."""

    @classmethod
    def from_env(cls) -> Self:
        """Return what the variables ``DUMPER_ENABLE``, … say; a blank one is not set."""
        found = {each.name: os.environ.get(f"DUMPER_{each.name.upper()}") for each in fields(cls)}
        settings: dict[str, Any] = {name: text for name, text in found.items() if text}
        return cls(**settings)


DumperConfig.__init__ = option_errors(DumperConfig)(DumperConfig.__init__)  # type: ignore[method-assign]

# -- the dumper ----------------------------------------------------------------------------------------------------


class Dumper:
    """Dump tensors by name and tags; does nothing before it is enabled.

    Recipe::

        from hookline.sglang import dumper

        dumper.configure(enable=True, dir="dumps", filter="layer_id == 3")  # or DUMPER_ENABLE=1 DUMPER_DIR=dumps
        dumper.dump("q", q, dims="b s h")
        dumper.step()

    Values are copied: what the model writes into a tensor later does not show.
    """

    def __init__(self, config: DumperConfig | None = None) -> None:
        self._config = config
        self._tags: ContextVar[Mapping[str, Any]] = ContextVar("tags of dumps", default=_NO_TAGS)
        self._folder = functools.cache(_make_folder)
        self._captured: dict[str, dict[str, Any]] | None = None
        self._step, self._indices = 0, itertools.count()

    @property
    def config(self) -> DumperConfig:
        """The settings; read from the environment when they are first needed."""
        if self._config is None:
            self._config = DumperConfig.from_env()
        return self._config

    def configure(self, **settings: Any) -> None:
        """Change settings, see `DumperConfig`."""
        self._config = replace(self.config, **settings)

    def step(self) -> None:
        """Count the next step."""
        self._step += 1

    def set_ctx(self, **tags: Any) -> None:
        """Give every dump of this thread more tags; None takes one away."""
        given = {**self._tags.get(), **tags}
        self._tags.set({key: value for key, value in given.items() if value is not None})

    def dump(
        self,
        name: str,
        value: Any,
        save: bool = True,
        dims: str | None = None,
        dims_grad: str | None = None,
        **tags: Any,
    ) -> None:
        """Dump a value.

        Args:
            name: Its name.
            value: Tensors in any structure, or a function that makes them, called only if the dump is wanted.
            save: Whether a file is written; False: only the line of the log.
            dims: What the dimensions are, such as ``"b s h[tp]"``; kept in ``meta``.
            dims_grad: The same for the gradient, where it differs.
            tags: More tags, for the filter, the file name and ``meta``; ``step`` stands for the dumper's own.
        """
        if not self.config.enable:
            return
        status = "recompute" if _torch.in_recomputation() else "disabled"
        every = {"recompute_status": status, "layer_id": _layer_running(), **self._tags.get(), **tags}
        if self.config.enable_value:
            self._dump(name, value, self._step, every, dims, save)
        if self.config.enable_grad:
            self._dump_gradients(name, value, every, dims_grad or dims, save)

    def register_non_intrusive_dumper(self, model: nn.Module) -> HandleSet:
        """Attach hooks that dump what modules take and give, as ``non_intrusive_mode`` says; return their handles.

        Recipe::

            dumper.configure(enable=True, dir="dumps", non_intrusive_mode="all")
            with dumper.register_non_intrusive_dumper(model):
                model(input_ids)

        ``all``: for each module ``non_intrusive__NAME.inputs.0`` (or a keyword's name), before its forward can change
        them, and ``non_intrusive__NAME.output``. What belongs to ``layers.3``, the layer's own inputs and output
        included, has the tag ``layer_id=3``. ``core``: the well-known arguments of the model alone, by their own names.
        ``off``: no hooks.
        """
        return _attach_hooks(model, self.dump, self.config.non_intrusive_mode)

    @contextmanager
    def capture_output(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Keep what is dumped in a dictionary, by name, in place of files: ``found["q"]["value"]``.

        Raises:
            ScopeError: inside of another one.
        """
        if self._captured is not None:
            raise ScopeError("capture_output is open already; leave the outer one first.")
        found: dict[str, dict[str, Any]] = {}
        self._captured = found
        try:
            yield found
        finally:
            self._captured = None

    def _dump(self, name: str, value: Any, step: int, tags: Mapping[str, Any], dims: str | None, save: bool) -> None:
        config = self.config
        asked = _Names({**tags, "name": name})
        if config.filter is not None and not eval(_compiled(config.filter), {"__builtins__": {}}, asked):
            return
        made = value() if callable(value) and not isinstance(value, Tensor) else value
        heads = {"step": step, "rank": this_rank(), "dump_index": next(self._indices), "name": name}
        known = {key: given for key, given in tags.items() if given is not None}
        meta = {**heads, **known, **({} if dims is None else {"dims": dims}), "world_size": rank_count()}
        content = {"value": to_builtins(made, _plain), "meta": {key: _plain(given) for key, given in meta.items()}}
        if self._captured is not None:
            self._captured[name] = content
            return
        path = None
        if save and config.enable_output_file:
            # The status is in the name of a file only where it says something.
            named = {key: given for key, given in known.items() if (key, given) != ("recompute_status", "disabled")}
            text = "___".join(f"{key}={quote(str(given), safe=' ,[]()')}" for key, given in {**heads, **named}.items())
            path = self._folder(config.dir, config.exp_name) / f"{text[:_LONGEST]}.pt"
            try:
                save_tensors(content, path)
            except Exception as error:  # a full disk: the run is not to end by its dump
                logger.warning("could not write %s: %r", path, error)
        if config.enable_output_console:
            shape = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type_name(made)
            logger.info("dump %s step=%d rank=%d %s -> %s", name, step, heads["rank"], shape, path)

    def _dump_gradients(self, name: str, value: Any, tags: Mapping[str, Any], dims: str | None, save: bool) -> None:
        """Dump the gradients of the tensors in ``value`` when they arrive, with step and tags of now."""
        step = self._step
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                full = f"grad__{name}.{path}" if path else f"grad__{name}"

                def see(grad: Tensor, full: str = full) -> None:
                    if self.config.enable:
                        self._dump(full, grad, step, tags, dims, save)

                attach_tensor(leaf, see, observe=True, name="dumper")


def _plain(value: Any) -> Any:
    """Return a copy of a tensor, a plain value itself, the text of anything else."""
    if isinstance(value, Tensor):
        return host_copy(value)
    return value if type(value) in (str, int, float, bool, type(None)) else str(value)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the host: what the model writes into the tensor later does not show, and a view is no more than
    its own numbers. Of a distributed tensor, copy the part of this rank.
    """
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    copied = own.to("cpu", copy=True)
    return copied.contiguous() if copied.layout is torch.strided else copied


def save_tensors(content: Mapping[str, Any], path: Path) -> None:
    """Write a file of a dump, wholly or not at all."""
    replace_file(path, lambda draft: torch.save(content, draft))


def _make_folder(dir: str, experiment: str | None) -> Path:
    """Return the folder of the experiment, the same on all ranks."""
    if experiment is None:
        now = datetime.now(UTC)
        # random.Random(): the run's own random numbers stay as they are.
        drawn = random.Random().randrange(1000)
        mine = f"dump_{now.strftime('%Y%m%d_%H%M%S')}_{now.microsecond // 1000:03d}{drawn:03d}"
        experiment = gather_objects(mine, what="name of a dump")[0]
    folder = Path(dir, experiment)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- hooks on modules ----------------------------------------------------------------------------------------------

_CORE_FIELDS: Final = (
    *("input_ids", "positions", "seq_lens", "req_pool_indices", "rids"),
    *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
)
"""What ``core`` dumps of the model's arguments, and of the batch among them."""
_LAYER: Final = re.compile(r"(?:.*\.)?layers\.(\d+)")
_LAYERS: Final[weakref.WeakKeyDictionary[nn.Module, int]] = weakref.WeakKeyDictionary()
"""The layers of all models that hooks of a dumper are on, with their numbers."""


def _attach_hooks(model: nn.Module, dump: Callable[..., None], mode: str) -> HandleSet:
    matches = {module: _LAYER.fullmatch(name) for name, module in clean_modules(model)}
    _LAYERS.update({module: int(match[1]) for module, match in matches.items() if match})

    def core(module: nn.Module, args: Any, kwargs: Any) -> None:
        for field, value in _core_fields(module, args, kwargs):
            dump(field, value)

    def inputs(module: nn.Module, args: Any, kwargs: Any, *, site: Site) -> None:
        for key, value in (*enumerate(args), *kwargs.items()):
            see(site.name, f"inputs.{key}", value)

    def output(module: nn.Module, args: Any, value: Any, *, site: Site) -> None:
        see(site.name, "output", value)

    def see(module_name: str, part: str, value: Any) -> None:
        name = f"non_intrusive__{module_name}.{part}" if module_name else f"non_intrusive__{part}"
        tensors = [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)]
        for path, tensor in tensors:
            dump(name if len(tensors) == 1 else f"{name}.{path}", tensor)

    handles = HandleSet()
    options: dict[str, Any] = {"observe": True, "name": "dumper"}
    if mode == "core":
        handles.add(attach(model, core, on="forward_pre", with_kwargs=True, **options))
    elif mode == "all":
        handles.add(attach(model, "*", inputs, on="forward_pre", with_kwargs=True, **options))
        handles.add(attach(model, "*", output, **options))
    return handles


def _core_fields(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the well-known arguments of a call, and those of the batch objects among them."""
    try:
        given = inspect.signature(unwrap(module).forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will raise
        given = kwargs
    holders = [value for value in given.values() if hasattr(value, "__dict__") and not isinstance(value, Tensor)]
    for field in _CORE_FIELDS:
        found: Iterable[Any] = (given.get(field), *(getattr(holder, field, None) for holder in holders))
        value = next((each for each in found if each is not None), None)
        if value is not None:
            yield field, value


def _layer_running() -> int | None:
    """Return the number of the innermost layer whose forward runs in this thread; None outside of any.

    No tag is set and cleared, so that a forward that raises leaves nothing behind.
    """
    if not _LAYERS:
        return None
    return next((_LAYERS[module] for module in _torch.running() if module in _LAYERS), None)


dumper: Final = Dumper()
"""The dumper of this process."""


# -- the outputs of all leaves, one file for each pass --------------------------------------------------------------

TOP_MODULE: Final = "TENSOR_DUMP_TOP_LEVEL_MODULE_NAME"
LAYERS_MODULE: Final = "TENSOR_DUMP_LAYERS_MODULE_NAME"
"""Environment variables that name the top module (``model``) and its list of layers (``layers``)."""
_BATCH_FIELDS: Final = ("input_ids", "seq_lens", "positions")


class TensorDumper:
    """The passes of a model, as files ``Pass00000.pt``, ``Pass00001.pt``, …: each a dict of names and CPU tensors.

    Made by `register_forward_hook_for_model`. Read a file with ``torch.load(path, weights_only=True)``.
    """

    def __init__(self, folder: Path, root: nn.Module, top: str) -> None:
        self.folder = folder
        """Where the files are."""
        self.passes = 0
        """How many there are, the one that runs included."""
        self.handles = HandleSet()
        self._root, self._top = root, top
        self._tensors: dict[str, Any] = {}
        """What the pass that runs has so far."""
        self._is_past_top = False

    def add_tensor(self, name: str, value: Any) -> None:
        """Add copies of the tensors in ``value`` to the pass that runs; a name that is there gets ``#1``, ``#2``, …"""
        for path, tensors in _copies(name, value):
            number, free = 0, path
            while free in self._tensors:
                number += 1
                free = f"{path}#{number}"
            if not self._tensors:
                self.passes += 1
            self._tensors[free] = tensors

    def dump_current_tensors(self) -> Path | None:
        """Write what the pass that runs has so far, and return the file; None if there is nothing."""
        if not self._tensors:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"Pass{self.passes - 1:05d}.pt"
        save_tensors(self._tensors, path)
        return path

    def remove(self) -> None:
        """Take the hooks off; what a pass without an end has left is written. May be repeated."""
        self.handles.remove(quiet=True)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<TensorDumper in {self.folder}, {self.passes} passes>"

    # -- passes: forwards of the root; where its forward() is called directly, from one top module to the next ---------

    def _end(self, *call: Any) -> None:
        """Write the pass; a hook on the root, before and after its forward."""
        self.dump_current_tensors()
        self._tensors, self._is_past_top = {}, False

    def _top_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_past_top and not _torch.times_running(self._root):
            self._end()
        for value in (*args, *kwargs.values()):
            if isinstance(getattr(value, "tensors", None), dict) or _fields_of_batch(value):
                self.add_tensor(self._top, value)

    def _see(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        is_direct = not _torch.times_running(self._root)
        if is_direct and self._is_past_top and site.name in self._tensors:
            self._end()
        self.add_tensor(site.name, output)
        self._is_past_top = self._is_past_top or site.name == self._top
        if is_direct and self._is_past_top:
            self.dump_current_tensors()  # nobody will say that the pass is over


def register_forward_hook_for_model(
    model: nn.Module,
    dump_dir: str | Path,
    dump_layers: Iterable[int] | int | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    pp_rank: int = 0,
) -> TensorDumper:
    """Dump the outputs of every module without children, and of the top module, at each pass.

    Recipe::

        with hookline.sglang.register_forward_hook_for_model(model, "dumps", [0, 11]) as dumper:
            model(input_ids)
        tensors = torch.load(dumper.folder / "Pass00000.pt", weights_only=True)

    Args:
        model: The model; it has a module ``model`` (or as ``TENSOR_DUMP_TOP_LEVEL_MODULE_NAME`` says) with a list
            ``layers`` (``TENSOR_DUMP_LAYERS_MODULE_NAME``).
        dump_dir: The files are in its folder ``TP{tp}_PP{pp}_Rank{rank}_pid{pid}``.
        dump_layers: Which layers; None: all. Modules outside of layers are always dumped.
        tp_size: How many ranks share a layer.
        tp_rank: Which of them this is.
        pp_rank: Which stage of a pipeline this is.

    Raises:
        NoMatchError: if there is no top module of that name.
        OptionError: for a layer that the model does not have.
    """
    root = unwrap(model)
    top = os.environ.get(TOP_MODULE) or "model"
    names = dict(clean_modules(model))
    if top not in names:
        near = ", ".join(map(repr, nearest_names(top, [name for name in names if name])))
        raise NoMatchError(f"model should have a module named {top}; nearest: {near}. Set {TOP_MODULE} to its name.")
    chosen = _chosen(names, top, f"{top}.{os.environ.get(LAYERS_MODULE) or 'layers'}.", dump_layers)
    rank = tp_size * pp_rank + tp_rank
    dumper = TensorDumper(Path(dump_dir) / f"TP{tp_rank}_PP{pp_rank}_Rank{rank}_pid{os.getpid()}", root, top)
    options: dict[str, Any] = {"observe": True, "name": "TensorDumper"}
    add = dumper.handles.add
    add(attach(model, dumper._end, on="forward_pre", **options))
    add(attach(model, top, dumper._top_begins, on="forward_pre", with_kwargs=True, **options))
    add(attach(model, lambda name, module: name in chosen, dumper._see, **options))
    add(attach(model, dumper._end, always_call=True, **options))
    return dumper


def _chosen(names: Mapping[str, nn.Module], top: str, layers: str, wanted: Iterable[int] | int | None) -> set[str]:
    """Return the names of the top module and of all leaves outside of layers, or in one that is wanted."""
    parts = {name: name.removeprefix(layers).partition(".")[0] for name in names if name.startswith(layers)}
    numbers = {name: int(part) for name, part in parts.items() if part.isdigit()}
    kept = set(numbers.values()) if wanted is None else {wanted} if isinstance(wanted, int) else set(wanted)
    unknown = sorted(kept - set(numbers.values()), key=str)
    if unknown:
        there = f"{min(numbers.values())} to {max(numbers.values())}" if numbers else "none"
        raise OptionError(f"dump_layers has {unknown[0]!r}; the layers under {layers!r} are: {there}.")
    leaf_names = [name for name, module in names.items() if name and not any(True for _ in module.children())]
    return {top} | {name for name in leaf_names if name not in numbers or numbers[name] in kept}


def _fields_of_batch(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch like SGLang's ``ForwardBatch``; nothing of another value."""
    fields = {name: getattr(value, name, None) for name in _BATCH_FIELDS}
    found = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
    return found if len(found) == len(fields) else {}


def _copies(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and copies: a tensor, or several, by the rules of SGLang's dump; other containers leaf by leaf."""
    proxy, logits = getattr(value, "tensors", None), getattr(value, "next_token_logits", None)
    if isinstance(value, Tensor):
        yield name, host_copy(value)
    elif isinstance(logits, Tensor):
        yield name, host_copy(logits)
    elif isinstance(proxy, dict):  # between the stages of a pipeline
        yield from ((f"{name}.pp_proxy_tensors.{key}", host_copy(each)) for key, each in proxy.items())
    elif batch := _fields_of_batch(value):
        yield from ((f"{name}.forward_batch_info.{key}", host_copy(each)) for key, each in batch.items())
    elif type(value) in (tuple, list) and all(isinstance(item, Tensor | None) for item in value):
        copies = [host_copy(item) for item in value if item is not None]
        if copies:
            yield name, copies[0] if len(copies) == 1 else copies
    elif children(value) is None:
        logger.warning("Unsupported type: %s of %s; nothing of it is dumped", type(value).__name__, name)
    else:
        yield from ((f"{name}.{path}", host_copy(leaf)) for path, leaf in leaves(value) if isinstance(leaf, Tensor))
