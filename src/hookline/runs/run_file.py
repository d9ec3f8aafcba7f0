"""Check a run file: everything that the flags of ``hookline run`` can say, and hooks, trackers and schedules as data.

The command line calls it with a `Document`. The keys that are flags too come from `run_options`; pydantic checks all of
them, and its errors become sentences with a path and a line. A key that is not known is an error.
"""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from hookline.errors import ConfigError
from hookline.load import from_folder
from hookline.messages import short_repr
from hookline.plain import own_copy
from hookline.runs.mistakes import Mistakes
from hookline.runs.read import Document, KeyPath, read_document
from hookline.runs.run_options import FILE_KEYS, GROUPS, field_help
from hookline.runs.spec_files import is_server_file, list_of_specs, server_settings, spec_faults, unknown_key

__all__ = ["RunFile", "placed_specs", "validate_value"]


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
        """Return the arguments of `StepSchedule`."""
        implied = "burst" if self.burst_length is not None else "continual" if self.stride is None else "stride"
        return {
            "mode": self.mode or implied,
            "stride": self.stride or 1,
            "burst_length": self.burst_length or 1,
            "warmup": self.warmup,
        }


class TrackerEntry(_Strict):
    """A tracker on some modules: its sums are reported at the end of each epoch, and it begins anew."""

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


def _flag_fields(section: str) -> dict[str, Any]:
    """Return the fields of a section of the file that are flags, for pydantic."""
    hints = {name: hint for group in GROUPS for name, hint in get_type_hints(group).items()}
    help_texts = {name: text for group in GROUPS for name, text in field_help(group).items()}
    defaults = {name: value for group in GROUPS for name, value in vars(group()).items()}
    found: dict[str, Any] = {}
    for flag, place in FILE_KEYS.items():
        above, _, key = place.key.rpartition(".")
        if above == section:
            default = defaults[flag] if place.convert is None else place.default
            about = Field(default=default, ge=place.least, description=place.about or help_texts[flag])
            found[key] = (place.type or hints[flag], about)
    return found


class _Experiment(_Strict):
    experiment: str | None = Field(default=None, description='A name, "path/file.py:Class" or "file.py:function".')


if TYPE_CHECKING:  # mypy does not know fields that are made of flags
    _HookFlags = _Strict
    _SinkFlags = _Strict
    _RunFlags = _Experiment
else:
    _HookFlags = create_model("_HookFlags", __base__=_Strict, **_flag_fields("hooks"))
    _SinkFlags = create_model("_SinkFlags", __base__=_Strict, **_flag_fields("sinks"))
    _RunFlags = create_model("_RunFlags", __base__=_Experiment, **_flag_fields(""))


class HookChoice(_HookFlags):
    """Lifecycle hooks, and how they are made."""

    config: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Arguments of hooks, by name.")
    schedules: dict[str, ScheduleEntry] = Field(
        default_factory=dict, description="At which steps hooks are due that fire at steps, by name."
    )


class SinkChoice(_SinkFlags):
    """Where metrics go, beside the record log and the console."""

    others: list[str | SinkEntry] = Field(default_factory=list, description="Sinks of one's own.")


class RunFile(_RunFlags):
    """Hold what a run file says.

    Recipe::

        run = RunFile.read("run.yaml")
        run.experiment, run.hooks.names, run.config
    """

    command: str | list[str] | None = Field(
        default=None, description="In place of an experiment, what starts a script: python train.py --lr 1e-3."
    )
    config: dict[str, Any] = Field(default_factory=dict, description="The experiment's own options.")
    hooks: HookChoice = Field(default_factory=HookChoice, description="Lifecycle hooks.")
    specs: list[dict[str, Any]] = Field(default_factory=list, description="Hooks on modules, see `HookSpec`.")
    enable_hooks: bool = Field(default=True, description="Whether the hooks on modules are attached.")
    trackers: list[TrackerEntry] = Field(default_factory=list, description="Trackers on modules.")
    sinks: SinkChoice = Field(default_factory=SinkChoice, description="Where metrics go.")

    @classmethod
    def read(cls, path: str | pathlib.Path) -> RunFile:
        """Read and check a file."""
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
        run._place_files(pathlib.Path(document.path).parent)
        if mistakes is None:
            found.check()
        return run

    @classmethod
    def _valid_part(cls, document: Document, mistakes: Mistakes) -> RunFile:
        """Return what is right in the file; what is wrong is left out, one layer of it after the other."""
        _check_one_list(document, mistakes)
        values = own_copy(_with_object_of_hooks(document.values))
        faults = spec_faults(values.get("specs"), ("specs",))
        while True:
            mistakes.add_all(faults)
            for path, _ in faults:
                if _is_in_schedule(path):  # emptied, not dropped: whether its hook can have one is still to be checked
                    values["hooks"]["schedules"][path[2]] = {}
            mistakes.drop(values, [path for path, _ in faults if not _is_in_schedule(path)])
            try:
                return cls.model_validate(values)
            except ValidationError as error:
                faults = _faults_of(error, cls)

    def _place_files(self, folder: pathlib.Path) -> None:
        """Give every ``file.py:Name`` its folder: it is relative to that of the run file."""
        hooks: Any = self.hooks
        if self.experiment is not None:
            self.experiment = from_folder(self.experiment, folder)
        if hooks.names is not None:
            hooks.names = tuple(from_folder(name, folder) for name in hooks.names)
        for tracker in self.trackers:
            tracker.tracker = from_folder(tracker.tracker, folder)
        for place, other in enumerate(self.sinks.others):
            if isinstance(other, str):
                self.sinks.others[place] = from_folder(other, folder)
            else:
                other.sink = from_folder(other.sink, folder)

    def given_sinks(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the sinks without a flag of their own: name or path, and arguments."""
        entries = [SinkEntry(sink=one) if isinstance(one, str) else one for one in self.sinks.others]
        return [(entry.sink, dict(entry.options)) for entry in entries]

    def command_words(self) -> list[str]:
        """Return the command that starts a script, word by word; nothing if the file names none."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command or ())

    def given_specs(self) -> list[dict[str, Any]]:
        """Return the hooks on modules, as the file has them; none if they are switched off."""
        return self.specs if self.enable_hooks else []

    def flags(self) -> dict[str, Any]:
        """Return what the file says, by the names of the flags."""
        found = {}
        for flag, place in FILE_KEYS.items():
            value: Any = self
            for key in place.key.split("."):
                value = getattr(value, key)
            found[flag] = value if place.convert is None else place.convert(value)
        return found


def placed_specs(document: Document) -> list[tuple[KeyPath, dict[str, Any]]]:
    """Return the hooks on modules of a file that is there for them, each with the path to it.

    The file is a list, the settings of a server, or a run file. In settings of a server, ``hooks`` count unless
    ``enable_hooks`` is false: the file was asked for by name.
    """
    values = document.values
    lists: dict[str, list[Any]] = {}
    if isinstance(values, list):
        return [((number,), spec) for number, spec in enumerate(list_of_specs(document))]
    if is_server_file(values):
        settings = server_settings(document)
        lists = {} if settings.get("enable_hooks") is False else {"hooks": settings.get("hooks") or []}
        lists["forward_hooks"] = settings.get("forward_hooks") or []
    else:
        key = "specs" if isinstance(values, dict) and "specs" in values else "hooks"
        lists[key] = RunFile.of(document).given_specs()
    return [((key, number), spec) for key, listed in lists.items() for number, spec in enumerate(listed)]


def _with_object_of_hooks(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return `values` with ``hooks`` as an object: it may be a list, of names or of the objects that a server takes.

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


def _is_in_schedule(path: KeyPath) -> bool:
    return path[:2] == ("hooks", "schedules") and len(path) > 2


def _check_one_list(document: Document, mistakes: Mistakes) -> None:
    listed = document.values.get("hooks")
    if not isinstance(listed, list) or "specs" not in document.values:
        return
    if not all(isinstance(entry, str) for entry in listed):
        mistakes.add(["hooks"], "hooks on modules are here and under specs; put them into one list.")


def validate_value(value: Any, declared: Any, place: str = "") -> Any:
    """Return `value` as `declared` has it: 1 as a float, a list as a tuple; `place` begins the error if not."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(declared, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, PydanticSchemaGenerationError, NameError):
        try:
            adapter = TypeAdapter(declared)  # a dataclass has settings of its own
        except Exception:
            return value  # a type that pydantic does not know
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        text = str(error.errors()[0]["msg"]).removeprefix("Input should be ")
        raise ConfigError(f"{place}{': ' if place else ''}expected {text}, got {value!r}.") from None


# -- the errors of pydantic, in words --------------------------------------------------------------------------

_BRANCHES: Final = ("str", "int", "bool", "float", "SinkEntry", "list[str]")
"""What pydantic puts into a path for the branches of a union; no key of a file is called like that."""


def _faults_of(error: ValidationError, model: type[BaseModel]) -> list[tuple[KeyPath, str]]:
    """Return the path and a sentence for each fault, none twice."""
    faults = error.errors()
    inside = {tuple(fault["loc"][: loc + 1]) for fault in faults for loc in range(len(fault["loc"]) - 1)}
    # Of a union, what is wrong inside of one branch says more than that the value is not of the other.
    told = [fault for fault in faults if not _is_other_branch(fault["loc"], inside)]
    return list(dict.fromkeys(_fault(fault, model) for fault in told))


def _is_other_branch(loc: tuple[Any, ...], inside: set[tuple[Any, ...]]) -> bool:
    others = [branch for branch in _BRANCHES if branch != loc[-1]] if loc and loc[-1] in _BRANCHES else []
    return any((*loc[:-1], branch) in inside for branch in others)


def _fault(fault: Any, model: type[BaseModel]) -> tuple[KeyPath, str]:
    path = tuple(key for key in fault["loc"] if isinstance(key, int) or key not in (*_BRANCHES, "[key]"))
    return path, _sentence(fault, model, path)


def _sentence(fault: Any, model: type[BaseModel], path: KeyPath) -> str:
    if fault["type"] == "extra_forbidden":
        return unknown_key(path[-1], list(_fields_at(model, path[:-1])))
    if fault["type"] == "invalid_key":
        return f"keys are text, got {path[-1]!r}."
    if fault["type"] == "missing":
        return "this is missing."
    text = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return text
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", text.removeprefix("Input should be "))
    return f"expected {text}, got {short_repr(fault['input'])}."


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> Mapping[str, Any]:
    """Return the keys that there are where an unknown one was found."""
    here: Any = model
    for key in path:
        if isinstance(key, int):
            continue
        if get_origin(here) is dict:  # the key is a name of the user's
            here = _model_in(here)
            continue
        field = getattr(_model_in(here), "model_fields", {}).get(key)
        here = None if field is None else field.annotation
    fields: Mapping[str, Any] = getattr(_model_in(here), "model_fields", {})
    return fields


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
