"""Dump tensors by name and tags, from anywhere in a model's code: SGLang's general dumper, `dumper`.

Users call ``dumper.dump("q", q, dims="b s h")``; `non_intrusive` calls it from hooks. It filters by tags, numbers the
dumps, and writes files or hands them to ``capture_output``. A file is
``DIR/EXPERIMENT/step=0___rank=0___dump_index=1___name=x.pt`` and holds ``{"value", "meta"}``; read it with
``torch.load(path, weights_only=True)``.
"""

from __future__ import annotations

import functools
import logging
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor, nn

from hookline.distributed.ranks import gather_objects, rank_count, this_rank
from hookline.errors import OptionError, ScopeError
from hookline.files import replace_file
from hookline.messages import type_name
from hookline.sglang.dumper_config import DumperConfig, FilterExpression
from hookline.sglang.non_intrusive import attach_dump_hooks, layer_running
from hookline.sites import _torch
from hookline.sites.handle import HandleSet
from hookline.sites.tensors import attach_tensor
from hookline.sites.wrappers import clean_modules
from hookline.tree import leaves

__all__ = ["Dumper", "dumper", "host_copy"]

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN_TAGS: Final = ("step", "rank", "dump_index", "name")


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
        self._config: DumperConfig | None = None
        self._filter: FilterExpression | None = None
        self._tags = threading.local()
        self._lock = threading.Lock()
        self._files = _DumpFiles()
        self._captured: dict[str, dict[str, Any]] | None = None
        self._step = 0
        self._index = 0
        if config is not None:
            self._set(config)

    # -- settings ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> DumperConfig:
        """The settings; read from the environment when they are first needed."""
        if self._config is None:
            self._set(DumperConfig.from_env())
        assert self._config is not None
        return self._config

    def configure(self, **settings: Any) -> None:
        """Change settings, see `DumperConfig`; another ``dir`` or ``exp_name`` begins another folder."""
        self._set(self.config.changed(settings))

    def configure_default(self, **settings: Any) -> None:
        """Change settings, but for those that the environment sets."""
        self._set(self.config.with_defaults(settings))

    def _set(self, config: DumperConfig) -> None:
        old = self._config
        if old is not None and (old.dir, old.exp_name) != (config.dir, config.exp_name):
            self._files = _DumpFiles()
        self._filter = None if config.filter is None else FilterExpression(config.filter)
        self._config = config

    def reset(self) -> None:
        """Begin again: step 0, index 0, no tags of this thread, another folder; the settings stay."""
        self._step = self._index = 0
        self._tags.values = {}
        self._files = _DumpFiles()

    def get_state(self) -> dict[str, Any]:
        """Return settings, step and index as plain values."""
        config = {name: getattr(self.config, name) for name in DumperConfig.__slots__}
        return {"config": config, "step": self._step, "dump_index": self._index}

    # -- tags --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count the next step."""
        self._step += 1

    def set_ctx(self, **tags: Any) -> None:
        """Give every dump of this thread more tags; None takes one away."""
        given = {**self._ctx(), **tags}
        self._tags.values = {key: value for key, value in given.items() if value is not None}

    def ctx(self, function: Callable[[Any], Mapping[str, Any]] | None = None, /, **tags: Any) -> Any:
        """Return a decorator that gives the dumps inside of a method tags: ``@ctx(k=v)``, ``@ctx(lambda self: {…})``.

        The tags that were there before are there again when the method returns or raises.
        """
        if (function is None) == (not tags):
            raise OptionError(
                "ctx takes tags (@ctx(k=v)) or one function of the first argument (@ctx(lambda self: …))."
            )

        def decorate(method: _Function) -> _Function:
            @functools.wraps(method)
            def inside(*args: Any, **kwargs: Any) -> Any:
                before = self._ctx()
                self.set_ctx(**(tags if function is None else function(args[0])))
                try:
                    return method(*args, **kwargs)
                finally:
                    self._tags.values = before

            return inside  # type: ignore[return-value]

        return decorate

    def _ctx(self) -> dict[str, Any]:
        tags: dict[str, Any] = getattr(self._tags, "values", {})
        return tags

    # -- dumping -----------------------------------------------------------------------------------------------

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
            tags: More tags, for the filter, the file name and ``meta``.
        """
        if not self.config.enable:
            return
        taken = [tag for tag in tags if tag in _OWN_TAGS]
        if taken:
            raise OptionError(f"The tag {taken[0]!r} is the dumper's own; give it another name.")
        every = {"recompute_status": _recompute_status(), **_layer_tag(), **self._ctx(), **tags}
        self._dump(name, value, self._step, every, {"dims": dims}, save=save)
        if self.config.enable_grad:
            self._dump_gradients(name, value, every, dims_grad or dims, save=save)

    def dump_model(
        self,
        model: nn.Module,
        name_prefix: str = "param",
        save: bool = True,
        get_grad: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad,
        step: int | None = None,
        **tags: Any,
    ) -> None:
        """Dump the parameters (``enable_model_value``) and their gradients (``enable_model_grad``) of a model.

        ``get_grad`` finds a gradient that is not in ``.grad``; ``step`` stands for the dumper's own.
        """
        config = self.config
        if not config.enable or not (config.enable_model_value or config.enable_model_grad):
            return
        at = self._step if step is None else step
        for name, parameter in _named_parameters(model):
            full, grad = f"{name_prefix}__{name}", get_grad(parameter)
            if config.enable_model_value:
                self._dump(full, parameter, at, {**self._ctx(), **tags}, {}, save=save)
            if config.enable_model_grad and grad is not None:
                self._dump(f"grad__{full}", grad, at, {**self._ctx(), **tags}, {}, save=save)

    def dump_dict(self, prefix: str, values: Any, save: bool = True, **tags: Any) -> None:
        """Dump each tensor of a mapping, or of an object's attributes, as ``prefix_key``."""
        items = values if isinstance(values, Mapping) else vars(values)
        for key, value in items.items():
            if isinstance(value, Tensor):
                self.dump(f"{prefix}_{key}", value, save=save, **tags)

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
        return attach_dump_hooks(model, self.dump, self.config.non_intrusive_mode)

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

    def _dump(
        self, name: str, value: Any, step: int, tags: Mapping[str, Any], about: Mapping[str, Any], *, save: bool
    ) -> None:
        if self._filter is not None and not self._filter({**tags, "name": name}):
            return
        if not self.config.enable_value and not name.startswith("grad__"):
            return
        made = value() if callable(value) and not isinstance(value, Tensor) else value
        with self._lock:
            index, self._index = self._index, self._index + 1
        heads = {"step": step, "rank": this_rank(), "dump_index": index, "name": name}
        kept = {key: given for key, given in {**tags, **about}.items() if given is not None}
        meta = {**heads, **kept, "world_size": rank_count()}
        content = {"value": _copied(made), "meta": {key: _plain(given) for key, given in meta.items()}}
        if self._captured is not None:
            self._captured[name] = content
            return
        config, path = self.config, None
        if save and config.enable_output_file:
            # The status is in the name of a file only where it says something.
            named = {k: v for k, v in tags.items() if v is not None and (k, v) != ("recompute_status", "disabled")}
            file = _file_name({**heads, **named})
            path = self._files.write(config.dir, config.exp_name, config.cleanup_previous, file, content)
        if config.enable_output_console:
            logger.info("dump %s step=%d rank=%d %s -> %s", name, step, heads["rank"], _shape(made), path)

    def _dump_gradients(self, name: str, value: Any, tags: Mapping[str, Any], dims: str | None, *, save: bool) -> None:
        """Dump the gradients of the tensors in ``value`` when they arrive, with step and tags of now."""
        if callable(value) and not isinstance(value, Tensor):
            return  # it makes its tensors only to be dumped: none of them gets a gradient
        step = self._step
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                full = f"grad__{name}.{path}" if path else f"grad__{name}"

                def see(grad: Tensor, full: str = full) -> None:
                    if self.config.enable:
                        self._dump(full, grad, step, tags, {"dims": dims}, save=save)

                attach_tensor(leaf, see, observe=True, name="dumper")


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in clean_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{key}" if name else key, parameter


def _layer_tag() -> dict[str, Any]:
    layer = layer_running()
    return {} if layer is None else {"layer_id": layer}


def _recompute_status() -> str:
    return "recompute" if _torch.in_recomputation() else "disabled"


def _copied(value: Any) -> Any:
    """Return plain containers with copies of the tensors, which hold their own numbers and no others."""
    if isinstance(value, Tensor):
        return host_copy(value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def _shape(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type_name(value)


# -- files -----------------------------------------------------------------------------------------------------

_LONGEST: Final = 240
"""Most file systems take 255 bytes."""


class _DumpFiles:
    """The folder of one experiment, decided at its first file."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def write(self, root: str, experiment: str | None, clear: bool, name: str, content: dict[str, Any]) -> Path | None:
        """Write one file and return it; None if that failed, which is logged and ends nothing."""
        if self.folder is None:
            self.folder = _folder(Path(root), experiment, clear)
        path = self.folder / name
        try:
            replace_file(path, lambda draft: torch.save(content, draft))
        except Exception as error:  # a value that cannot be pickled, a full disk: the run is not to end by its dump
            logger.warning("could not write %s: %r", path, error)
            return None
        return path


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the host: what the model writes into the tensor later does not show, and a view is no more than
    its own numbers. Of a distributed tensor, copy the part of this rank.
    """
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    copied = own.to("cpu", copy=True)
    return copied.contiguous() if copied.layout is torch.strided else copied


def _file_name(tags: Mapping[str, Any]) -> str:
    """Return the name of a file with these tags; letters that no file may have are written as %2F and the like."""
    text = "___".join(f"{key}={quote(str(value), safe=' ,[]()')}" for key, value in tags.items())
    return f"{text[:_LONGEST]}.pt"


def _folder(root: Path, experiment: str | None, clear: bool) -> Path:
    """Return the folder of the experiment, the same on all ranks; with ``clear``, delete what earlier dumps left."""
    if experiment is None:
        now = datetime.now(UTC)
        # random.Random(): the run's own random numbers stay as they are.
        drawn = random.Random().randrange(1000)
        mine = f"dump_{now.strftime('%Y%m%d_%H%M%S')}_{now.microsecond // 1000:03d}{drawn:03d}"
        experiment = gather_objects(mine, what="name of a dump")[0]
    folder = root / experiment
    if clear:
        if this_rank() == 0:
            for old in {folder, *root.glob("dump_*")}:
                if _is_dump(old):
                    shutil.rmtree(old)
        gather_objects(None, what="clearing earlier dumps")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_dump(folder: Path) -> bool:
    """Return whether a folder has nothing but dumps in it: what somebody else put there is not ours to delete."""
    return folder.is_dir() and all(path.name.startswith("step=") for path in folder.iterdir())


dumper: Final = Dumper()
"""The dumper of this process."""
