"""The flags of ``hookline run``, as typed fields; tyro makes the command line of them.

Filled by `request` from the arguments, over what a run file or a run that is resumed says. No torch here: help is
quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

__all__ = ["CONSOLES", "RunOptions", "flat"]


def _arg(metavar: str | None = None, hint: str | None = "") -> Any:
    """How a flag is shown; ``hint`` None shows its default."""
    return arg(metavar=metavar, help_behavior_hint=hint)


def _one_of(*words: str) -> Any:
    """A flag that takes one of some words; of `Literal` beside None tyro would offer ``None`` as a word."""

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
    """A flag that takes whole numbers, or none; of those beside None tyro would tell what it tried."""

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


CONSOLES: Final = ("live", "lines", "tables", "silent", "none")
"""What the terminal can show."""
Flag = Annotated[bool, _arg()]


@dataclass
class TrainingOptions:
    """How it is trained"""

    strategy: Annotated[str | None, _arg("NAME|all")] = None
    """Which of the experiment's strategies; all: one after the other, each in a folder of its own. The first if left
    out."""
    seed: Annotated[int, _arg("N", None)] = 199
    """What all random streams start from."""
    device: Annotated[str | None, _arg("DEVICE")] = None
    """cpu, cuda, cuda:1, mps; if left out, the GPU if there is one."""
    dtype: Annotated[str | None, _arg("DTYPE")] = None
    """Turn the model's parameters into this: float32, float64, bfloat16, float16."""
    with_compile: Flag = False
    """Compile the model (torch.compile); hooks fire all the same."""
    no_determinism: Flag = False
    """Let torch take kernels that may differ from run to run."""
    matmul_precision: Annotated[str | None, _one_of("highest", "high", "medium"), _arg()] = None
    """How exactly a GPU multiplies float32 matrices."""


@dataclass
class HookOptions:
    """Hooks"""

    with_hooks: Annotated[str | None, _arg("GROUP")] = None
    """A group of hooks that the experiment names; hooks for debugging are left out of it. none: no hooks."""
    hooks: Annotated[tuple[str, ...] | None, _arg("[NAME ...|all|observers|with_debug]")] = None
    """More hooks: by name, from a file (file.py:Class), or all of a kind. training_metrics is always among them."""
    hook_config: Annotated[tuple[str, ...], _arg("HOOK.PARAM=VALUE ...")] = ()
    """Arguments of hooks, typed as the hook declares them: hessian.epsilon=1e-3 stats.targets=a,b x.flag=true."""
    hook_specs: Annotated[str | None, _arg("FILE")] = None
    """Hooks on modules, as data: a JSON, YAML or TOML list of name, target_modules, hook_factory, config."""
    hook_offload_state: Flag = False
    """Keep the tensors of hooks on the CPU while they do not run."""
    on_hook_error: Annotated[str, _one_of("raise", "warn", "disable"), _arg(None, None)] = "raise"
    """When a hook raises, and what it did is undone: the run fails; a warning, and the hook stays on; or the hook is
    switched off."""
    profile_hooks: Flag = False
    """Time every hook until the device has done its work, and print a table at the end."""
    hooks_list: Flag = False
    """List all hooks, and leave."""
    hooks_describe: Annotated[tuple[str, ...] | None, _arg("[HOOK ...]")] = None
    """Describe the metrics of hooks (all, if none is named), and leave."""


@dataclass
class SinkOptions:
    """Where metrics go, beside the record log and the console"""

    hook_csv: Flag = False
    """A table: {strategy}.csv."""
    hook_jsonl: Flag = False
    """A line of JSON per record: {strategy}.jsonl."""
    hook_parquet: Flag = False
    """A long table: {strategy}.parquet."""
    hook_tensorboard: Flag = False
    """Event files, in tensorboard/."""
    hook_mlflow: Flag = False
    """A local MLflow store, in the run's folder."""
    hook_wandb: Annotated[str | None, _arg("PROJECT")] = None
    """Weights & Biases: a run per strategy, in one group."""
    hook_prometheus: Annotated[int | None, _arg("PORT")] = None
    """A page of the newest values on a port of this machine."""
    hook_sink: Annotated[tuple[str, ...], _arg("PKG.MOD:CLASS ...")] = ()
    """Sinks of your own: package.module:Class, file.py:Class, or the name of an entry point (hookline.sinks)."""


@dataclass
class OutputOptions:
    """What it shows and leaves behind"""

    output_dir: Annotated[str, _arg("DIR", None)] = "runs"
    """Where the folders of runs are: DIR/EXPERIMENT/STRATEGY."""
    console: Annotated[str | None, _one_of(*CONSOLES), _arg()] = None
    """live: a column of chosen metrics with trends; lines: a line of numbers per snapshot; tables: all metrics at every
    snapshot; silent: progress and closing lines alone; none. If left out: live on a terminal, lines elsewhere."""
    show: Annotated[tuple[str, ...], _arg("METRIC ...")] = ()
    """Which metrics are in the lines and the live view: val_acc, norms/total_norm, 'hessian/*'."""
    live: Flag = False
    """The same as --console live."""
    silent: Flag = False
    """The same as --console silent; goes before --live."""
    no_console_output: Flag = False
    """The same as --console none: print nothing but errors. Goes before --silent."""
    no_report: Flag = False
    """Do not write report.html at the end."""
    record_trajectory: Flag = False
    """Save the model's parameters at every snapshot, in trajectory/."""
    dry_run: Flag = False
    """Print the plan (which hook when, on what, at what cost in memory, which files), and leave."""


@dataclass
class CheckpointOptions:
    """Saving and going on"""

    save_checkpoints: Annotated[tuple[int, ...] | None, _whole_numbers(), _arg()] = None
    """Save every N epochs (step loop: steps; 1 and 100 if N is left out). One is written at the end and on Ctrl-C in
    any case."""
    validate_checkpoints: Annotated[tuple[int, ...] | None, _whole_numbers(), _arg()] = None
    """The same, and each is read back and compared with what was saved, bit for bit: OK or MISMATCH."""
    resume: Flag = False
    """Go on with the newest run of this experiment and strategy, with its options; flags given here win over them."""
    force: Flag = False
    """Resume although the configuration has changed."""
    config: Annotated[str | None, _arg("FILE")] = None
    """A run file whose settings hold where no flag is given; the same as giving it in place of EXPERIMENT."""


@dataclass
class RunOptions:
    """Everything but the experiment's own options."""

    experiment: Annotated[Positional[str | None], _arg("EXPERIMENT")] = None
    """A name (mod_arithmetic, digits), path/file.py:Class, file.py:function, package.module:Class, or a run file
    (.yaml, .toml, .json)."""
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
        """The same with other values for some flags, by name; a name that is no flag is passed over."""
        groups = []
        for group in self.groups:
            changed = {name: values[name] for name in vars(group) if name in values}
            groups.append(type(group)(**(vars(group) | changed)))
        return RunOptions(values.get("experiment", self.experiment), *groups)


def flat(options: RunOptions) -> dict[str, Any]:
    """Every flag by its name."""
    found: dict[str, Any] = {"experiment": options.experiment}
    for group in options.groups:
        found |= {one.name: getattr(group, one.name) for one in fields(group)}
    return found
