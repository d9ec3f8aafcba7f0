"""`Run`: all that a run needs, as one value, whoever asks for it.

A run file holds one, the flags of ``hookline run`` change one, ``run.json`` keeps it for ``--resume``, and `build`
makes hooks, sinks and a manager of it. Names are looked up while it is validated, so that all mistakes come at once.
What was not given is absent (``model_fields_set``). Importing this module imports no torch: help comes at once.
"""

from __future__ import annotations

import pkgutil
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hookline.runs.documents import Spec, collected
from hookline.runs.flags import Option, Show, options_of_model

_LAST_PORT: Final = 65535
_TRAINING: Final = "How it is trained"
_HOOKS: Final = "Hooks"
_SINKS: Final = "Where metrics go, beside the record log and the console"
_OUTPUT: Final = "What it shows and leaves behind"
_SAVING: Final = "Saving and going on"


def _hook_flag(name: str, metavar: str | None = None) -> Show:
    return Show(metavar, name=name, group=_HOOKS)


def _sink_flag(name: str, metavar: str | None = None) -> Show:
    return Show(metavar, name=name, group=_SINKS)


# -- look-ups that are validators ------------------------------------------------------------------------------


def _looked_up(path: str) -> AfterValidator:
    """Return a validator that calls the function at `path` with a value, and leaves the value as it is.

    The function is imported then: those of hooks and devices import torch, which help does not need.
    """

    def check(value: Any) -> Any:
        with collected() as faults, faults.at():
            if value is not None:
                pkgutil.resolve_name(path)(value)
        return value

    return AfterValidator(check)


_HOOK: Final = _looked_up("hookline.runs.build:known_hook")
_SINK: Final = _looked_up("hookline.runs.build:sink_class")
_SPEC_FILE: Final = _looked_up("hookline.runs.documents:specs_for_run")
_DEVICE: Final = _looked_up("hookline.runs.find:device_of")


def _groups(info: ValidationInfo) -> Mapping[str, Sequence[str]] | None:
    """Return the groups of hooks that the experiment has; None if it cannot be found, so that nothing is known."""
    context = info.context or {}
    return None if context.get("is_unknown") else getattr(context.get("found"), "hook_sets", {})


Every = StrictBool | Annotated[int, Field(ge=1)]
_Count = Annotated[int | None, Field(ge=0), Show("N", group=_TRAINING)]


# -- the parts of a run ----------------------------------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), defer_build=True
    )  # help needs no validator, which takes 0.1 s to make

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None}


class Hooks(_Part):
    """Lifecycle hooks, and how they are made."""

    with_hooks: Annotated[str | None, _hook_flag("with_hooks", "GROUP")] = None
    """A group of hooks that the experiment names; hooks for debugging are left out of it. none: no hooks."""
    names: Annotated[list[Annotated[str, _HOOK]] | None, _hook_flag("hooks", "[NAME ...|all|observers|with_debug]")] = (
        None
    )
    """More hooks: by name, from a file (file.py:Class), or all of a kind. training_metrics is always among them."""
    config: Annotated[dict[str, dict[str, Any]], _hook_flag("hook_config", "HOOK.PARAM=VALUE ...")] = {}
    """Arguments of hooks, typed as the hook declares them: hessian.epsilon=1e-3 stats.targets=a,b x.flag=true."""
    offload_state: Annotated[bool, _hook_flag("hook_offload_state")] = False
    """Keep the tensors of hooks on the CPU while they do not run."""
    on_error: Annotated[Literal["raise", "warn", "disable"], _hook_flag("on_hook_error")] = "raise"
    """When a hook raises, and what it did is undone: the run fails; a warning, and the hook stays on; or the hook is
    switched off."""
    profile: Annotated[bool, _hook_flag("profile_hooks")] = False
    """Time every hook until the device has done its work, and print a table at the end."""

    @field_validator("names", mode="before")
    @classmethod
    def _no_specs(cls, names: Any) -> Any:
        if isinstance(names, list) and any(isinstance(each, Mapping) for each in names):
            raise ValueError("these are hooks on modules, which go under specs:.")
        return names

    @field_validator("with_hooks")
    @classmethod
    def _known_group(cls, group: str | None, info: ValidationInfo) -> str | None:
        from hookline.runs.build import hooks_of_group

        groups = _groups(info)
        if group is not None and groups is not None:
            with collected() as faults, faults.at():
                hooks_of_group(group, groups)
        return group

    @field_validator("config")
    @classmethod
    def _arguments(cls, config: dict[str, dict[str, Any]], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        from hookline.runs.build import check_is_on, hook_argument

        hooks = cls._chosen(info)
        with collected() as faults:

            def typed(hook: str, arguments: dict[str, Any]) -> dict[str, Any]:
                check_is_on(hook, hooks)
                return faults.each(arguments, partial(hook_argument, hook), hook)

            found = faults.each(config, typed)
        return found

    @property
    def says_on_error(self) -> bool:
        """Whether it was given what happens when a hook raises; a script that nobody asked is not ended by a hook."""
        return "on_error" in self.model_fields_set

    @classmethod
    def _chosen(cls, info: ValidationInfo) -> list[str] | None:
        """Return the hooks of the run; None if they cannot be told, as something that says so is wrong."""
        from hookline.runs.build import chosen_hooks

        groups = _groups(info)
        if not {"with_hooks", "names"} <= set(info.data) or (groups is None and info.data["with_hooks"]):
            return None
        return chosen_hooks(info.data["with_hooks"], info.data["names"], groups or {})


class Sink(_Part):
    """A sink by its name or path, with arguments."""

    sink: Annotated[str, _SINK]
    """"package.module:Class", "file.py:Class", or a name: of an entry point, or of a class of hookline.sinks."""
    options: dict[str, Any] = {}
    """Its arguments."""

    @model_validator(mode="after")
    def _takes_its_options(self) -> Sink:
        from hookline.runs.build import check_arguments

        with collected() as faults, faults.at("options"):
            check_arguments(self.sink, self.options)
        return self


class Sinks(_Part):
    """Where metrics go, beside the record log and the console."""

    FILES: ClassVar = {
        "csv": "{strategy}.csv",
        "jsonl": "{strategy}.jsonl",
        "parquet": "{strategy}.parquet",
        "tensorboard": "tensorboard",
        "mlflow": "mlflow.db",
        "wandb": "wandb",
    }
    """The file that each leaves in the folder of the run."""
    csv: Annotated[bool, _sink_flag("hook_csv")] = False
    """A table: {strategy}.csv."""
    jsonl: Annotated[bool, _sink_flag("hook_jsonl")] = False
    """A line of JSON per record: {strategy}.jsonl."""
    parquet: Annotated[bool, _sink_flag("hook_parquet")] = False
    """A long table: {strategy}.parquet."""
    tensorboard: Annotated[bool, _sink_flag("hook_tensorboard")] = False
    """Event files, in tensorboard/."""
    mlflow: Annotated[bool, _sink_flag("hook_mlflow")] = False
    """A local MLflow store, in the run's folder."""
    wandb: Annotated[str | None, _sink_flag("hook_wandb", "PROJECT")] = None
    """Weights & Biases: a run per strategy, in one group."""
    prometheus: Annotated[int | None, Field(ge=0, le=_LAST_PORT), _sink_flag("hook_prometheus", "PORT")] = None
    """A page of the newest values on a port of this machine; 0: one that is free."""
    others: Annotated[
        list[Annotated[Sink, BeforeValidator(lambda given: {"sink": given} if isinstance(given, str) else given)]],
        _sink_flag("hook_sink", "NAME|PKG.MOD:CLASS ..."),
    ] = []
    """More sinks: package.module:Class, file.py:Class, the name of an entry point (hookline.sinks), or of a class of
    hookline.sinks (memory: MemorySink)."""

    @field_validator("csv", "jsonl", "parquet", "tensorboard", "mlflow", "wandb", "prometheus")
    @classmethod
    def _is_installed(cls, value: Any, info: ValidationInfo) -> Any:
        from hookline.runs.build import sink_class

        if value is not None and value is not False:
            sink_class(str(info.field_name))
        return value

    def chosen(self) -> dict[str, Any]:
        """Return the sinks with a flag of their own that are on, by name."""
        values = ((name, getattr(self, name)) for name in type(self).model_fields if name != "others")
        return {name: value for name, value in values if value is not None and value is not False}

    def files(self, strategy: str) -> dict[str, str]:
        """Return the files that these write into the folder of the run, by sink."""
        return {name: file.format(strategy=strategy) for name, file in self.FILES.items() if name in self.chosen()}


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class Run(_Part):
    """All that a run needs: what to train, with which hooks, where metrics go.

    Recipe::

        run = Run(experiment="mod_arithmetic", hooks={"names": ["norms"]}, sinks={"csv": True})
        built = build(run)  # hooks, sinks, specs, manager
    """

    experiment: str | None = None
    """A name (mod_arithmetic), path/file.py:Class, file.py:function, package.module:Class."""
    command: Annotated[list[str], BeforeValidator(_words)] = []
    """In place of an experiment, what starts a script: python train.py --lr 1e-3."""
    strategy: Annotated[str | None, Show("NAME|all", group=_TRAINING)] = None
    """Which of the experiment's strategies; all: one after the other, each in a folder of its own. The first if left
    out."""
    epochs: _Count = None
    """How many times to go through the data."""
    steps: _Count = None
    """How many steps to train, in the step loop."""
    snapshot_every: _Count = None
    """How many epochs (step loop: steps) from one snapshot to the next; 0 for none."""
    eval_every: _Count = None
    """How many epochs from one evaluation to the next."""
    config: dict[str, Any] = {}
    """The experiment's own options."""
    seed: Annotated[int, Field(ge=0), Show("N", group=_TRAINING)] = 199
    """What all random streams start from."""
    device: Annotated[str | None, _DEVICE, Show("DEVICE", group=_TRAINING)] = None
    """cpu, cuda, cuda:1, mps; if left out, the GPU if there is one."""
    with_compile: Annotated[bool, Show(group=_TRAINING)] = False
    """Compile the model (torch.compile); hooks fire all the same."""
    determinism: Annotated[bool, Show(group=_TRAINING)] = True
    """Have torch take deterministic kernels where it has any."""
    matmul_precision: Annotated[Literal["highest", "high", "medium"] | None, Show(group=_TRAINING)] = None
    """How exactly a GPU multiplies float32 matrices."""
    hooks: Hooks = Field(default_factory=Hooks)
    """Lifecycle hooks, and how they are made; or a list of their names."""
    specs: list[Spec] = []
    """Hooks on modules, see `HookSpec`."""
    hook_specs: Annotated[str | None, _SPEC_FILE, Show("FILE", group=_HOOKS)] = None
    """More hooks on modules: a JSON, YAML or TOML list of name, target_modules, hook_factory, config."""
    sinks: Sinks = Field(default_factory=Sinks)
    """Where metrics go."""
    output_dir: Annotated[str, Show("DIR", group=_OUTPUT)] = "runs"
    """Where the folders of runs are: DIR/EXPERIMENT/STRATEGY."""
    name: Annotated[str | None, Show("NAME", group=_OUTPUT)] = None
    """What pages call the run, in headings, legends and tables; EXPERIMENT / STRATEGY if left out."""
    run_group: str | None = None
    """What W&B calls the strategies of one run together; EXPERIMENT and the time if left out."""
    console: Annotated[Literal["live", "tables", "silent", "none"] | None, Show(group=_OUTPUT)] = None
    """live: a column of chosen metrics with trends; tables: all metrics at every snapshot; silent: progress and closing
    lines alone; none. If left out: live on a terminal, else silent."""
    report: Annotated[bool, Show(group=_OUTPUT)] = True
    """Write report.html at the end."""
    record_trajectory: Annotated[bool, Show(group=_OUTPUT)] = False
    """Save the model's parameters at every snapshot, in trajectory/."""
    save_checkpoints: Annotated[Every, Show("[N]", group=_SAVING)] = False
    """Save every N epochs (step loop: steps; 1 and 100 if N is left out). One is written at the end and on Ctrl-C in
    any case."""
    validate_checkpoints: Annotated[Every, Show("[N]", group=_SAVING)] = False
    """The same, and each is read back and compared with what was saved, bit for bit: OK or MISMATCH."""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, strategy: str | None, info: ValidationInfo) -> str | None:
        found = (info.context or {}).get("found")
        if found is not None:
            found.chosen(strategy)
        return strategy

    @field_validator("config")
    @classmethod
    def _options_of_experiment(cls, config: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        found = (info.context or {}).get("found")
        if found is None:
            return config
        with collected() as faults:
            typed = faults.each(config, found.option)
        return typed

    @field_validator("validate_checkpoints")
    @classmethod
    def _one_of_two(cls, every: bool | int, info: ValidationInfo) -> bool | int:
        if every is not False and info.data.get("save_checkpoints", False) is not False:
            raise ValueError("save_checkpoints and this do not go together: this saves as well.")
        return every

    @model_validator(mode="before")
    @classmethod
    def _hooks_as_object(cls, values: Any) -> Any:
        return object_of_hooks(values)


def object_of_hooks(values: Any) -> Any:
    """Return `values` with ``hooks`` as an object: it may be a list of names."""
    listed = values.get("hooks") if isinstance(values, Mapping) else None
    return {**values, "hooks": {"names": listed}} if isinstance(listed, list) else values


@cache
def run_flags_by_name() -> dict[str, Option]:
    """Return the flags that every experiment has, by name: ``hook_csv`` is ``--hook-csv``."""
    return {one.name: one for one in options_of_model(Run)}
