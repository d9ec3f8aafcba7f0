"""The run file: everything that the flags of ``hookline run`` can say, and hooks, trackers and schedules as data.

Takes a `Document` from `read`, hands checked values to the command line. A key that nobody knows is an error, with the
keys that may have been meant, its path and its line.
"""

from __future__ import annotations

import pathlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hookline.config.mistakes import Mistakes, Path
from hookline.config.pydantic_errors import faults_of
from hookline.config.read_settings import Document, read_document
from hookline.config.spec_files import checked_list, is_server_file, server_settings, spec_faults
from hookline.errors import ConfigError
from hookline.specs.copy_config import own_copy

__all__ = [
    "HookChoice",
    "RunFile",
    "ScheduleEntry",
    "SinkChoice",
    "SinkEntry",
    "TrackerEntry",
    "placed_specs",
    "read_specs",
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, protected_namespaces=())


class ScheduleEntry(_Strict):
    """At which steps a hook is due; what `hookline.StepSchedule` takes."""

    mode: Literal["continual", "stride", "burst"] | None = Field(
        default=None,
        description="Every step, every n-th, or some in a row every n; by what else is given, if left out.",
    )
    stride: int | None = Field(default=None, ge=1, description="Steps from one (or the first of a burst) to the next.")
    burst_length: int | None = Field(default=None, ge=1, description="How many steps in a row.")
    warmup: int = Field(default=0, ge=0, description="No step before this one.")

    @model_validator(mode="after")
    def _goes_together(self) -> ScheduleEntry:
        mode = self.arguments()["mode"]
        if mode == "continual" and self.stride is not None:
            raise ValueError("A continual schedule has no stride: it is mode: stride, or burst.")
        if mode != "burst" and self.burst_length is not None:
            raise ValueError(f"A schedule by {mode} has no burst_length: it is mode: burst.")
        if mode != "continual" and self.stride is None:
            raise ValueError(f"A schedule by {mode} says how many steps there are from one to the next: stride: 50.")
        return self

    def arguments(self) -> dict[str, Any]:
        """What `StepSchedule` is made with."""
        guessed = "burst" if self.burst_length is not None else "continual" if self.stride is None else "stride"
        return {
            "mode": self.mode or guessed,
            "stride": self.stride or 1,
            "burst_length": self.burst_length or 1,
            "warmup": self.warmup,
        }


class HookChoice(_Strict):
    """Which hooks over time, and how they are made."""

    with_hooks: str | None = Field(default=None, description="A group of the experiment's hooks.")
    names: list[str] | None = Field(default=None, description="Hooks by name; also all, observers, with_debug.")
    config: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Arguments of hooks, by name.")
    schedules: dict[str, ScheduleEntry] = Field(
        default_factory=dict, description="At which steps hooks are due that fire at steps, by name."
    )
    offload_state: bool = Field(
        default=False, description="Keep the tensors of hooks on the CPU while they do not run."
    )
    on_error: Literal["raise", "warn", "disable"] = Field(
        default="raise", description="When one raises: the run fails; a warning; or the hook is switched off."
    )
    profile: bool = Field(default=False, description="Time every hook, the device's work included.")


class TrackerEntry(_Strict):
    """A tracker on some modules: what it has counted is reported at the end of each epoch, and it begins anew."""

    tracker: str = Field(description="relu_activations, saturated_activations, fisher_information, gradient_flow, …")
    name: str = Field(default="", description="What its sums are reported by, if there are several of a kind.")
    target_modules: list[str] | str | None = Field(
        default=None, description="Patterns of module names; if left out, the layers of its kind."
    )
    exclude: list[str] | str | None = Field(default=None, description="Patterns of modules to leave out.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its other arguments.")


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
    specs: list[dict[str, Any]] = Field(default_factory=list, description="Hooks on modules, see `HookSpec`.")
    enable_hooks: bool = Field(default=True, description="Whether the hooks on modules are attached.")
    trackers: list[TrackerEntry] = Field(default_factory=list, description="Trackers on modules.")
    sinks: SinkChoice = Field(default_factory=lambda: SinkChoice(), description="Where metrics go.")
    console: Literal["live", "lines", "tables", "normal", "silent", "none"] | None = Field(
        default=None,
        description="What the terminal shows; normal is tables. If left out: live on a terminal, lines elsewhere.",
    )
    show: list[str] = Field(default_factory=list, description="Which metrics are in the lines and the live view.")
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

    @classmethod
    def read(cls, path: str | pathlib.Path) -> RunFile:
        """Read and check a file; the paths in it that are files stand beside it, or in the current folder."""
        return cls.of(read_document(path))

    @classmethod
    def of(cls, document: Document, mistakes: Mistakes | None = None) -> RunFile:
        """Check what was read.

        What is wrong is added to `mistakes`, and what is returned has the rest; without `mistakes` it is raised.
        """
        values = document.values
        if values is None:
            raise ConfigError(f"{document.path} is empty; it says at least which experiment to run: experiment: NAME.")
        if not isinstance(values, dict):
            what = "a list" if isinstance(values, list) else "text" if isinstance(values, str) else repr(values)
            raise ConfigError(
                f"{document.path} holds {what}, and settings are keys with values (experiment, strategy, config, …)."
            )
        found = Mistakes.of(document) if mistakes is None else mistakes
        run = cls._valid_part(document, found)
        if mistakes is None:
            found.check()
        return run

    @classmethod
    def _valid_part(cls, document: Document, mistakes: Mistakes) -> RunFile:
        """Return what can be made of the file; what cannot is left out, one layer of it after the other."""
        _check_one_list(document, mistakes)
        values = own_copy(_in_place(document.values))
        faults = spec_faults(values.get("specs"), ("specs",))
        while True:
            for path, text in faults:
                mistakes.add(path, text)
            _empty_schedules(values, faults)
            mistakes.drop(values, [path for path, _ in faults if not _is_in_schedule(path)])
            try:
                return cls.model_validate(values)
            except ValidationError as error:
                faults = faults_of(error, cls)

    def given_specs(self) -> list[dict[str, Any]]:
        """The hooks on modules, as the file says them; none if they are switched off."""
        return self.specs if self.enable_hooks else []


def read_specs(document: Document) -> list[dict[str, Any]]:
    """The hooks on modules of a file that is there for them: a list, the settings of a server, or a run file.

    In settings of a server, ``hooks`` count unless ``enable_hooks`` is false: the file was asked for by name.
    """
    return [spec for _, spec in placed_specs(document)]


def placed_specs(document: Document) -> list[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """The same, each with the path to it."""
    values = document.values
    lists: dict[str, list[Any]] = {}
    if isinstance(values, list):
        return [((number,), spec) for number, spec in enumerate(checked_list(document))]
    if is_server_file(values):
        settings = server_settings(document)
        lists = {} if settings.get("enable_hooks") is False else {"hooks": settings.get("hooks") or []}
        lists["forward_hooks"] = settings.get("forward_hooks") or []
    else:
        lists["specs" if isinstance(values, dict) and "specs" in values else "hooks"] = RunFile.of(
            document
        ).given_specs()
    return [((key, number), spec) for key, listed in lists.items() for number, spec in enumerate(listed)]


def _in_place(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the values with ``hooks`` as an object: it may be a list, of names or of the objects that a server takes.

    Null is the same as nothing.
    """
    values = {key: value for key, value in values.items() if key != "$schema" and value is not None}
    listed = values.get("hooks")
    if not isinstance(listed, list):
        return values
    del values["hooks"]
    if all(isinstance(entry, str) for entry in listed):
        return values | {"hooks": {"names": listed}}
    return {"specs": listed} | values


def _is_in_schedule(path: Path) -> bool:
    return path[:2] == ("hooks", "schedules") and len(path) > 2


def _empty_schedules(values: dict[Any, Any], faults: list[tuple[Path, str]]) -> None:
    """Make schedules that something is wrong with empty: whether their hooks can have one is still to be checked."""
    for path, _ in faults:
        if _is_in_schedule(path):
            values["hooks"]["schedules"][path[2]] = {}


def _check_one_list(document: Document, mistakes: Mistakes) -> None:
    listed = document.values.get("hooks")
    if not isinstance(listed, list) or "specs" not in document.values:
        return
    if not all(isinstance(entry, str) for entry in listed):
        mistakes.add(["hooks"], "hooks on modules are here and under specs; put them into one list.")
