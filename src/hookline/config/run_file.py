"""The run file: everything that the flags of ``hookline run`` can say, and the hooks that are given as data.

Takes a `Document` from `read`, hands checked values to the command line. A key that nobody knows is an error, with the
keys that may have been meant, its path and its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from hookline.config.read import Document, read_document
from hookline.errors import ConfigError

__all__ = ["HookChoice", "HooksFile", "RunFile", "SinkChoice", "SinkEntry", "SpecEntry", "read_specs"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, protected_namespaces=())


class HookChoice(_Strict):
    """Which hooks over time, and how they are made."""

    with_hooks: str | None = Field(default=None, description="A group of the experiment's hooks.")
    names: list[str] | None = Field(default=None, description="Hooks by name; also all, observers, with_debug.")
    config: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Arguments of hooks, by name.")
    offload_state: bool = Field(
        default=False, description="Keep the tensors of hooks on the CPU while they do not run."
    )
    profile: bool = Field(default=False, description="Time every hook, the device's work included.")


class SinkEntry(_Strict):
    """A sink of one's own."""

    sink: str = Field(description='"package.module:Class", "file.py:Class", or the name of an entry point.')
    options: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")


class SinkChoice(_Strict):
    """Where metrics go, beside the record log and the console."""

    csv: bool = Field(default=False, description="A table, {strategy}.csv.")
    jsonl: bool = Field(default=False, description="A line of JSON per record, {strategy}.jsonl.")
    wandb: str | None = Field(default=None, description="A project of Weights & Biases.")
    tensorboard: bool = Field(default=False, description="Event files in tensorboard/.")
    mlflow: bool = Field(default=False, description="A local MLflow store.")
    parquet: bool = Field(default=False, description="A long table, {strategy}.parquet.")
    prometheus: int | None = Field(default=None, description="The port of a metrics page on this machine.")
    others: list[str | SinkEntry] = Field(default_factory=list, description="Sinks of one's own.")


class SpecEntry(_Strict):
    """A hook on modules, as data; what `hookline.register_hooks` takes."""

    name: str = Field(default="", description="What messages call it.")
    target_modules: list[str] | str | None = Field(default=None, description="Patterns of module names.")
    hook_factory: str | None = Field(default=None, description='What makes the hook: "package.module:function".')
    config: dict[str, Any] = Field(default_factory=dict, description="What the factory is called with.")
    on: str = Field(default="forward", description="The kind of hook.")
    observe: bool = Field(default=False, description="What it returns is ignored.")
    every: int | None = Field(default=None, description="Call it every so many steps.")
    sees: Literal["edited", "raw"] | None = Field(default=None, description="What an observer sees.")
    exclude: list[str] | str | None = Field(default=None, description="Patterns of modules to leave out.")
    enabled: bool = Field(default=True, description="Whether it is attached at all.")
    on_error: Literal["raise", "warn", "disable"] = Field(default="raise", description="What happens when it raises.")

    def given(self) -> dict[str, Any]:
        """What the file says of it, and nothing else."""
        return self.model_dump(exclude_unset=True)


class HooksFile(_Strict):
    """The hooks that a server is configured with: ``enable_hooks`` and ``hooks``."""

    enable_hooks: bool = Field(default=True, description="Whether the hooks are attached.")
    hooks: list[SpecEntry] | None = Field(default=None, description="The hooks.")


class RunFile(_Strict):
    """What ``hookline run FILE`` does.

    Recipe::

        run = RunFile.read("run.yaml")
        run.experiment, run.hooks.names, run.config
    """

    experiment: str | None = Field(default=None, description='A name, "path/file.py:Class" or "file.py:function".')
    strategy: str | None = Field(default=None, description="Which way of running it; all for each in turn.")
    config: dict[str, Any] = Field(default_factory=dict, description="The experiment's own options.")
    hooks: HookChoice = Field(default_factory=lambda: HookChoice(), description="Hooks over time.")
    specs: list[SpecEntry] = Field(default_factory=list, description="Hooks on modules.")
    enable_hooks: bool = Field(default=True, description="Whether the hooks on modules are attached.")
    sinks: SinkChoice = Field(default_factory=lambda: SinkChoice(), description="Where metrics go.")
    console: Literal["normal", "live", "silent", "none"] = Field(
        default="normal", description="What the terminal shows."
    )
    seed: int = Field(default=199, ge=0, description="What random streams start from.")
    output_dir: str = Field(default="runs", description="Where the folders of runs are.")
    device: str | None = Field(default=None, description="cpu, cuda, cuda:1, …")
    dtype: str | None = Field(default=None, description="What the parameters are turned into: float32, bfloat16, …")
    with_compile: bool = Field(default=False, description="Compile the model.")
    determinism: bool = Field(default=True, description="Have torch take deterministic kernels where it has any.")
    matmul_precision: Literal["highest", "high", "medium"] | None = Field(
        default=None, description="Of float32 on a GPU."
    )
    save_checkpoints: bool | int = Field(default=False, description="Save every so many epochs (step loop: steps).")
    report: bool = Field(default=True, description="Write report.html at the end.")

    @model_validator(mode="before")
    @classmethod
    def _lists_of_hooks(cls, values: Any) -> Any:
        """``hooks`` may be a list: of names, or of the objects that a server takes."""
        if isinstance(values, dict) and isinstance(values.get("hooks"), list):
            listed = values["hooks"]
            values = {key: value for key, value in values.items() if key != "hooks"}
            if all(isinstance(entry, str) for entry in listed):
                values["hooks"] = {"names": listed}
            elif "specs" not in values:
                values["specs"] = listed
        return values

    @classmethod
    def read(cls, path: str | Path) -> RunFile:
        """Read and check a file; the paths in it that are files stand beside it, or in the current folder."""
        return cls.of(read_document(path))

    @classmethod
    def of(cls, document: Document) -> RunFile:
        """Check what was read."""
        if document.values is None:
            raise ConfigError(f"{document.path} is empty; it says at least which experiment to run: experiment: NAME.")
        run: RunFile = _checked(cls, document)
        return run


def read_specs(document: Document) -> list[dict[str, Any]]:
    """The hooks on modules of a file: a list of them, a server's ``hooks``, or the ``specs`` of a run file."""
    values = document.values
    if isinstance(values, list):
        return [entry.given() for entry in _checked_list(document)]
    if isinstance(values, dict) and set(values) <= set(HooksFile.model_fields):
        file: HooksFile = _checked(HooksFile, document)
        return [entry.given() for entry in file.hooks or ()] if file.enable_hooks else []
    run = RunFile.of(document)
    return [entry.given() for entry in run.specs] if run.enable_hooks else []


# -- mistakes, in words -----------------------------------------------------------------------------------------


def _checked(model: type[BaseModel], document: Document) -> Any:
    if not isinstance(document.values, dict):
        raise ConfigError(
            f"{document.path} holds {_kind(document.values)}, and settings are keys with values "
            f"({', '.join(list(model.model_fields)[:3])}, …)."
        )
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        raise ConfigError(_text(error, model, document)) from None


def _checked_list(document: Document) -> list[SpecEntry]:
    class _List(_Strict):
        hooks: list[SpecEntry]

    try:
        return _List.model_validate({"hooks": document.values}).hooks
    except ValidationError as error:
        raise ConfigError(_text(error, _List, document, under=1)) from None


def _text(error: ValidationError, model: type[BaseModel], document: Document, under: int = 0) -> str:
    found = dict.fromkeys(_sentence(fault, model, document, under) for fault in error.errors())
    return "\n".join(found)


def _sentence(fault: Any, model: type[BaseModel], document: Document, under: int) -> str:
    path = tuple(key for key in fault["loc"] if _is_place(key, fault["loc"]))
    shown = path[under:]
    if document.values is not None and isinstance(document.values, dict) and isinstance(_at(document, "hooks"), list):
        # The list was written under `hooks`, and checked as `specs`, or as `hooks.names`.
        shown = ("hooks", *shown[2:]) if shown[:2] == ("hooks", "names") else shown
        shown = ("hooks", *shown[1:]) if shown[:1] == ("specs",) and "specs" not in document.values else shown
    where = document.place(shown)
    if fault["type"] == "extra_forbidden":
        keys = list(_fields_at(model, path[:-1]))
        near = get_close_matches(str(path[-1]), keys, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        return f"{where}: nothing is called {path[-1]!r} here.{meant} There are: {', '.join(keys)}."
    if fault["type"] == "missing":
        return f"{where}: this is missing."
    return f"{where}: {_expected(fault)}, got {fault['input']!r}."


def _is_place(key: Any, loc: Sequence[Any]) -> bool:
    """Pydantic puts the branch of a union into the path; no key of a file looks like that."""
    return isinstance(key, int) or key not in ("str", "int", "bool", "SinkEntry", "list[str]", "float")


def _at(document: Document, key: str) -> Any:
    return document.values.get(key) if isinstance(document.values, Mapping) else None


def _expected(fault: Any) -> str:
    text = str(fault["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    return f"expected {text}"


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> Mapping[str, FieldInfo]:
    """The keys that there are where an unknown one was found."""
    here: Any = model
    for key in path:
        if isinstance(key, int):
            continue
        field = here.model_fields.get(key) if hasattr(here, "model_fields") else None
        if field is None:
            return {}
        here = _model_in(field.annotation)
    fields: Mapping[str, FieldInfo] = getattr(here, "model_fields", {})
    return fields


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if (found := _model_in(part)) is not None:
            return found
    return None


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), f"a {type(value).__name__}")
