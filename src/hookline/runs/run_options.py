"""Declare the options of a run, once: each field is a flag of ``hookline run`` and, with `InFile`, a key of a run file.

tyro makes the command line of these classes, `run_file` makes the checks of a run file, and the command line reads
both. Imports neither torch nor pydantic, so that help comes at once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import operator
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

__all__ = [
    "FILE_KEYS",
    "InFile",
    "OutputOptions",
    "RunOptions",
    "SinkOptions",
    "field_help",
    "flag",
    "flat",
    "manager_options",
]


class InFile(NamedTuple):
    """Say where a run file has the value of a flag, and in which form.

    Recipe: ``no_report: Annotated[Flag, InFile("report", bool, lambda on: not on)]``.
    """

    key: str
    """``"hooks.names"`` is ``names`` under ``hooks``."""
    type: Any = None
    """Its type there, if it is not that of the flag."""
    convert: Callable[[Any], Any] | None = None
    """Makes the value of the flag from that of the file."""
    default: Any = None
    """What the file means without the key, where `convert` is given."""
    about: str = ""
    """What it is, if the text of the flag does not say it."""
    least: int | None = None
    """The least number it may be."""


def flag(metavar: str | None = None, hint: str | None = "") -> Any:
    """Return how a flag is shown in help; ``hint`` None shows its default."""
    return arg(metavar=metavar, help_behavior_hint=hint)


def _one_of(literal: Any) -> Any:
    """Return how a flag reads one of some words; for `Literal` beside None tyro would offer ``None`` as a word."""
    words = get_args(literal)

    def word(given: list[str]) -> str:
        if given[0] not in words:
            raise ValueError(f"one of {', '.join(words)} is wanted, got {given[0]!r}")
        return given[0]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(words),
        instance_from_str=word,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


def _whole_numbers() -> Any:
    """Return how a flag reads whole numbers, or none; tyro's own message lists everything that it tried."""

    def numbers(given: list[str]) -> tuple[int, ...]:
        try:
            return tuple(map(int, given))
        except ValueError:
            raise ValueError(f"a whole number is wanted, such as 10, or none at all; got {' '.join(given)!r}") from None

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[N]",
        instance_from_str=numbers,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [str(one) for one in value or ()],
    )


def _save_every(value: bool | int) -> tuple[int, ...] | None:
    return None if value is False else () if value is True else (value,)


Flag = Annotated[bool, flag()]
Precision = Literal["highest", "high", "medium"]
OnError = Literal["raise", "warn", "disable"]
Shown = Literal["live", "lines", "tables", "silent", "none"]
ShownByFile = Literal["live", "lines", "tables", "normal", "silent", "none"]


@dataclass
class TrainingOptions:
    """How it is trained"""

    strategy: Annotated[str | None, flag("NAME|all"), InFile("strategy")] = None
    """Which of the experiment's strategies; all: one after the other, each in a folder of its own. The first if left
    out."""
    seed: Annotated[int, flag("N", None), InFile("seed", least=0)] = 199
    """What all random streams start from."""
    device: Annotated[str | None, flag("DEVICE"), InFile("device")] = None
    """cpu, cuda, cuda:1, mps; if left out, the GPU if there is one."""
    dtype: Annotated[str | None, flag("DTYPE"), InFile("dtype")] = None
    """Turn the model's parameters into this: float32, float64, bfloat16, float16."""
    with_compile: Annotated[Flag, InFile("with_compile")] = False
    """Compile the model (torch.compile); hooks fire all the same."""
    no_determinism: Annotated[
        Flag,
        InFile("determinism", bool, operator.not_, True, "Have torch take deterministic kernels where it has any."),
    ] = False
    """Let torch take kernels that may differ from run to run."""
    matmul_precision: Annotated[Precision | None, _one_of(Precision), flag(), InFile("matmul_precision")] = None
    """How exactly a GPU multiplies float32 matrices."""
    threads: Annotated[int | None, flag("N"), InFile("threads", least=1)] = None
    """Threads of torch on the CPU. If left out: OMP_NUM_THREADS, or one for a small model, or torch's own number."""


@dataclass
class HookOptions:
    """Hooks"""

    with_hooks: Annotated[str | None, flag("GROUP"), InFile("hooks.with_hooks")] = None
    """A group of hooks that the experiment names; hooks for debugging are left out of it. none: no hooks."""
    hooks: Annotated[tuple[str, ...] | None, flag("[NAME ...|all|observers|with_debug]"), InFile("hooks.names")] = None
    """More hooks: by name, from a file (file.py:Class), or all of a kind. training_metrics is always among them."""
    hook_config: Annotated[tuple[str, ...], flag("HOOK.PARAM=VALUE ...")] = ()
    """Arguments of hooks, typed as the hook declares them: hessian.epsilon=1e-3 stats.targets=a,b x.flag=true."""
    hook_specs: Annotated[str | None, flag("FILE")] = None
    """Hooks on modules, as data: a JSON, YAML or TOML list of name, target_modules, hook_factory, config."""
    hook_offload_state: Annotated[Flag, InFile("hooks.offload_state")] = False
    """Keep the tensors of hooks on the CPU while they do not run."""
    on_hook_error: Annotated[OnError, _one_of(OnError), flag(None, None), InFile("hooks.on_error")] = "raise"
    """When a hook raises, and what it did is undone: the run fails; a warning, and the hook stays on; or the hook is
    switched off."""
    profile_hooks: Annotated[Flag, InFile("hooks.profile")] = False
    """Time every hook until the device has done its work, and print a table at the end."""
    hooks_list: Flag = False
    """List all hooks, and leave."""
    hooks_describe: Annotated[tuple[str, ...] | None, flag("[HOOK ...]")] = None
    """Describe the metrics of hooks (all, if none is named), and leave."""


@dataclass
class SinkOptions:
    """Where metrics go, beside the record log and the console"""

    hook_csv: Annotated[Flag, InFile("sinks.csv")] = False
    """A table: {strategy}.csv."""
    hook_jsonl: Annotated[Flag, InFile("sinks.jsonl")] = False
    """A line of JSON per record: {strategy}.jsonl."""
    hook_parquet: Annotated[Flag, InFile("sinks.parquet")] = False
    """A long table: {strategy}.parquet."""
    hook_tensorboard: Annotated[Flag, InFile("sinks.tensorboard")] = False
    """Event files, in tensorboard/."""
    hook_mlflow: Annotated[Flag, InFile("sinks.mlflow")] = False
    """A local MLflow store, in the run's folder."""
    hook_wandb: Annotated[str | None, flag("PROJECT"), InFile("sinks.wandb")] = None
    """Weights & Biases: a run per strategy, in one group."""
    hook_prometheus: Annotated[int | None, flag("PORT"), InFile("sinks.prometheus")] = None
    """A page of the newest values on a port of this machine."""
    hook_sink: Annotated[tuple[str, ...], flag("NAME|PKG.MOD:CLASS ...")] = ()
    """More sinks: package.module:Class, file.py:Class, the name of an entry point (hookline.sinks), or of a class of
    hookline.sinks (memory: MemorySink)."""


@dataclass
class OutputOptions:
    """What it shows and leaves behind"""

    output_dir: Annotated[str, flag("DIR", None), InFile("output_dir")] = "runs"
    """Where the folders of runs are: DIR/EXPERIMENT/STRATEGY."""
    name: Annotated[str | None, flag("NAME"), InFile("name")] = None
    """What pages call the run, in headings, legends and tables; EXPERIMENT / STRATEGY if left out."""
    console: Annotated[
        Shown | None,
        _one_of(Shown),
        flag(),
        InFile("console", ShownByFile | None, lambda mode: "tables" if mode == "normal" else mode),
    ] = None
    """live: a column of chosen metrics with trends; lines: a line of numbers per snapshot; tables: all metrics at every
    snapshot; silent: progress and closing lines alone; none. If left out: live on a terminal, lines elsewhere."""
    show: Annotated[tuple[str, ...], flag("METRIC ..."), InFile("show")] = ()
    """Which metrics are in the lines and the live view: val_acc, norms/total_norm, 'hessian/*'."""
    live: Flag = False
    """The same as --console live."""
    silent: Flag = False
    """The same as --console silent; goes before --live."""
    no_console_output: Flag = False
    """The same as --console none: print nothing but errors. Goes before --silent."""
    no_report: Annotated[Flag, InFile("report", bool, operator.not_, True, "Write report.html at the end.")] = False
    """Do not write report.html at the end."""
    record_trajectory: Flag = False
    """Save the model's parameters at every snapshot, in trajectory/."""
    dry_run: Flag = False
    """Print the plan (which hook when, on what, at what cost in memory, which files), and leave."""
    json: Flag = False
    """Print as JSON what is said at the end, what --profile-hooks measured among it, or the plan of --dry-run. Nothing
    else goes to the standard output."""


@dataclass
class CheckpointOptions:
    """Saving and going on"""

    save_checkpoints: Annotated[
        tuple[int, ...] | None,
        _whole_numbers(),
        flag(),
        InFile("save_checkpoints", bool | int, _save_every, False),
    ] = None
    """Save every N epochs (step loop: steps; 1 and 100 if N is left out). One is written at the end and on Ctrl-C in
    any case."""
    validate_checkpoints: Annotated[tuple[int, ...] | None, _whole_numbers(), flag()] = None
    """The same, and each is read back and compared with what was saved, bit for bit: OK or MISMATCH."""
    resume: Flag = False
    """Go on with the newest run of this experiment and strategy, with its options; flags given here win over them."""
    force: Flag = False
    """Resume although the configuration has changed."""
    config: Annotated[str | None, flag("FILE")] = None
    """A run file whose settings hold where no flag is given; the same as giving it in place of EXPERIMENT."""


@dataclass
class RunOptions:
    """All options but those of the experiment itself."""

    experiment: Annotated[Positional[str | None], flag("EXPERIMENT | -- COMMAND")] = None
    """A name (mod_arithmetic, digits), path/file.py:Class, file.py:function, package.module:Class, or a run file
    (.yaml, .toml, .json); or a script of your own behind --, such as -- python train.py."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    hook: HookOptions = field(default_factory=HookOptions)
    sink: SinkOptions = field(default_factory=SinkOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The flags, group by group."""
        return self.training, self.hook, self.sink, self.output, self.checkpoint

    def with_values(self, values: dict[str, Any]) -> RunOptions:
        """Return the same with other values for some flags, by name; a name that is no flag is passed over."""
        groups = []
        for group in self.groups:
            changed = {name: values[name] for name in vars(group) if name in values}
            groups.append(type(group)(**(vars(group) | changed)))
        return RunOptions(values.get("experiment", self.experiment), *groups)


def flat(options: RunOptions) -> dict[str, Any]:
    """Return every flag by its name."""
    found: dict[str, Any] = {"experiment": options.experiment}
    for group in options.groups:
        found |= vars(group)
    return found


def manager_options(flags: Mapping[str, Any], hook_config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the options of a run say to its `HookManager`, whoever makes it.

    Args:
        flags: The values of flags by name, of the command line or of a run file.
        hook_config: Arguments by hook; and, beside them, where reference weights are.
    """
    return {
        "offload_state": flags["hook_offload_state"],
        "profile_hooks": flags["profile_hooks"],
        "on_error": flags["on_hook_error"],
        "reference_weights": hook_config.get("reference_weights", {}).get("path"),
    }


GROUPS: Final = (TrainingOptions, HookOptions, SinkOptions, OutputOptions, CheckpointOptions)
FILE_KEYS: Final[dict[str, InFile]] = {
    name: found
    for group in GROUPS
    for name, hint in get_type_hints(group, include_extras=True).items()
    for found in get_args(hint)[1:]
    if isinstance(found, InFile)
}
"""By flag, where a run file has its value."""


def field_help(cls: type) -> dict[str, str]:
    """Return what is said of each field of a dataclass: ``metadata["help"]``, or the string under it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _strings_under_fields(base)
    for one in dataclasses.fields(cls):
        if isinstance(one.metadata.get("help"), str):
            found[one.name] = one.metadata["help"]
    return found


def _strings_under_fields(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # made at run time: there is no source
        return {}
    lines = body.body if isinstance(body, ast.ClassDef) else []
    found = {}
    for line, below in itertools.pairwise(lines):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            text = getattr(below.value, "value", None)
            if isinstance(text, str):
                found[line.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return found
