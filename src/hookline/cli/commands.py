"""The commands that ask one question: ``hooks``, ``find``, ``doctor``, ``check``, ``report``, ``parity``, and so on.

`main` calls the function of a command's name with its arguments; the dataclass before it has its flags and its help.
Each imports what answers it when it is called. They attach and write nothing, but for pages, replays and ``new``.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import inspect
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from hookline.cli.main import DONE, FAILED, NOT_ATTACHED, WRONG_USE
from hookline.cli.screen import messages, print_table, tell, tell_found, tell_json, tell_plan
from hookline.errors import OptionError
from hookline.load import add_current_folder_to_path, load_object, without_arguments
from hookline.messages import counted
from hookline.plain import to_plain
from hookline.runs.flags import Show, parse
from hookline.runs.folder import LOG, read_run_json, run_folder

if TYPE_CHECKING:
    from hookline.debug.audit.audit import Audit
    from hookline.report.report_page import WrittenPage
    from hookline.specs.hook_spec import HookSpec

# -- hooks: the hooks there are --------------------------------------------------------------------------------


@dataclass
class HooksOptions:
    """List the hooks there are; with names, describe their options and metrics.

    Examples:
      hookline hooks
      hookline hooks norms hessian
      hookline hooks --json
    """

    names: Annotated[tuple[str, ...], Show("[NAME ...]", is_word=True)] = ()
    """Hooks to describe, or all, observers, interventions, with_debug; also file.py:Class."""
    json: bool = False
    """Print options and metrics of these hooks, or of all, as JSON."""


def hooks(arguments: Sequence[str]) -> int:
    """List all hooks, or describe those that are named."""
    options = parse(HooksOptions, arguments, "hooks")
    return show_hooks(options.names or None, as_json=options.json)


def show_hooks(names: Sequence[str] | None, *, as_json: bool) -> int:
    """Describe the hooks ``names``, or all but those for debugging if it is empty; list all hooks if it is None."""
    from hookline.lifecycle.registry import HookRegistry
    from hookline.runs.build import known_hook

    with messages():
        found = [hook for name in names or () for hook in known_hook(name)]
        if as_json:
            chosen = found if names else HookRegistry.get_all_info()
            tell_json("hooks", {"hooks": [_hook_facts(name) for name in chosen]})
        elif names is None:
            _list_hooks(HookRegistry.get_all_info())
        else:
            for name in found if names else HookRegistry.list_all():
                tell_plan("hooks", _hook_facts(name), as_json=False)
    return DONE


def _list_hooks(known: dict[str, Any]) -> None:
    for kind in ("observer", "intervention"):
        rows = [
            (name, f"{info['description']}{' (for debugging)' * info['debug']}")
            for name, info in known.items()
            if info["kind"] == kind
        ]
        if rows:
            print_table("", (kind, "what it does"), rows)
            tell()
    tell(f"{len(known)} hooks. Points, needs, options and metrics of one: hookline hooks NAME")


def _hook_facts(name: str) -> dict[str, Any]:
    """Return everything that is known of a hook, as JSON."""
    from hookline.lifecycle.registry import HookRegistry

    parameters = inspect.signature(HookRegistry.get(name)).parameters.values()
    return {
        "name": name,
        **HookRegistry.get_info(name),
        "options": [_option(one) for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)],
        "metrics": [
            {"name": m.name, "description": m.description, "formula": m.formula, "sign_info": m.sign_info}
            for m in HookRegistry.describe(name)
        ],
    }


def _option(one: inspect.Parameter) -> dict[str, str]:
    """Return name, type and default of an option as text; empty where there is none."""
    hint = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
    return {
        "name": one.name,
        "type": "" if one.annotation is one.empty else hint,
        "default": "" if one.default is one.empty else str(one.default),
    }


# -- find: the modules of a model ------------------------------------------------------------------------------


@dataclass
class FindOptions:
    """Show the modules of a model that a pattern matches, with type, parameters and hooks.

    Examples:
      hookline find my_file.py:make_model
      hookline find my_file.py:MyModel 'layers.#.mlp'     # # is a number, * crosses dots
      hookline find mod_arithmetic '*.mlp.*'
      hookline find models/llama 'role:attn'              # a folder of transformers: its config.json is enough
    """

    model: Annotated[str, Show("FILE:MODEL", is_word=True)]
    """A model, its class, or a function that makes one: file.py:NAME or package.module:NAME; also an experiment, or the
    folder of a saved model."""
    pattern: Annotated[str, Show("[PATTERN]", is_word=True)] = "*"
    """Which modules; all if left out."""
    json: bool = False
    """Print JSON."""


def find(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = parse(FindOptions, arguments, "find")
    from hookline.sites import find as sites

    model = model_at(options.model)
    found = sites.find(model, options.pattern)
    modules = [
        {"name": site.name, "type": site.type, "parameters": site.num_parameters, "hooks": found.hooks(site)}
        for site in found
    ]
    tell_found("find", {"modules": modules}, found, as_json=options.json)
    return DONE


def model_at(path: str) -> Any:
    """Return the model that a path names: itself, made by its class or a function, or that of an experiment.

    Of the folder of a model that transformers has saved, return the model without its weights.
    """
    from torch import nn

    from hookline.runs.find import EMBEDDED

    if path not in EMBEDDED and Path(path).expanduser().is_dir():
        from hookline.serve.load_model import make_empty

        return make_empty(Path(path).expanduser())
    thing = load_object(EMBEDDED.get(path, path), wanted="a model")
    if not isinstance(thing, nn.Module) and callable(thing):
        with without_arguments(path):
            thing = _made_model(thing, path)
    model = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    if not isinstance(model, nn.Module):
        raise OptionError(f"{path} gives {thing!r}, and a model is an nn.Module.")
    return model


def _made_model(thing: Any, path: str) -> Any:
    from hookline.training.experiment import Experiment

    if isinstance(thing, type) and issubclass(thing, Experiment) and thing is not Experiment:
        config = None if thing.config_class is None else thing.config_class()
        strategies = thing.strategies or ("default",)
        return thing(config, strategies[0])  # type: ignore[arg-type]
    try:
        inspect.signature(thing).bind()
    except TypeError as error:
        raise OptionError(f"{path} cannot be called without arguments ({error}); name a function that can.") from None
    return thing()


# -- doctor: who hooks what in a model -------------------------------------------------------------------------


@dataclass
class DoctorOptions:
    """Say who hooks what in a model, and which modules no hook would fire on and why.

    Exit codes: 0 no problems, 1 problems.

    Examples:
      hookline doctor my_file.py:make_model
      hookline doctor mod_arithmetic --json
    """

    model: Annotated[str, Show("FILE:MODEL", is_word=True)]
    """A model, its class, or a function that makes one: file.py:NAME or package.module:NAME; also an experiment."""
    json: bool = False
    """Print JSON."""


def doctor(arguments: Sequence[str]) -> int:
    """Print the diagnosis."""
    options = parse(DoctorOptions, arguments, "doctor")
    from hookline.debug.diagnose.doctor import doctor as examine

    found = examine(model_at(options.model))
    tell_found("doctor", found.to_dict(), found, as_json=options.json)
    return FAILED if found.problems else DONE


# -- audit: which hook changes a run ----------------------------------------------------------------------------


_OF_AUDITS: Final = {"same": DONE, "changed": FAILED, "not repeatable": WRONG_USE, "undecided": NOT_ATTACHED}


@dataclass
class AuditOptions:
    """Train with and without hooks, compare bit for bit after every step, and name the hook that changes the run.

    Exit codes: 0 the same to the last bit, 1 a hook changes the run, 2 the training does not repeat by itself, 3 it
    undecided, as a hook did not fire.

    Examples:
      hookline audit my_run.yaml                                    # the hooks of a run file
      hookline audit mod_arithmetic --hooks norms hessian --steps 50
    """

    run: Annotated[str, Show("RUNFILE", is_word=True)]
    """A run file, or an experiment: its name, or path/file.py:Class. For a function that trains: hookline.audit()."""
    hooks: Annotated[tuple[str, ...], Show("HOOK")] = ()
    """Names of hooks or groups, in place of those of the file."""
    steps: Annotated[int, Show("N")] = 20
    """After how many steps a training is stopped."""
    json: bool = False
    """Print JSON."""


def audit(arguments: Sequence[str]) -> int:
    """Print the audit, and return the exit code."""
    options = parse(AuditOptions, arguments, "audit")
    # What the training prints is not the answer.
    with messages(), contextlib.redirect_stdout(sys.stderr):
        found = _audited(options.run, options.hooks, options.steps)
    tell_found("audit", found.to_dict(), found, as_json=options.json)
    return _OF_AUDITS[found.verdict]


def _audited(path: str, hooks: Sequence[str], steps: int) -> Audit:
    """Audit the hooks of a run file, or of an experiment; ``hooks`` are taken in place of those the file names."""
    from hookline.debug.audit.audit import audit as audit_training
    from hookline.debug.audit.audit import did_nothing
    from hookline.runs.build import build, spec_name
    from hookline.runs.find import make_experiment, process_settings
    from hookline.runs.read import read

    run, found, *_ = read([path, *(["--hooks", *hooks] if hooks else [])])
    built = build(run, found)
    specs = {spec_name(spec, place): spec for place, spec in enumerate(built.specs)}
    if found is None:
        raise OptionError(f"{path} runs a script; put its training into a function, for hookline.audit().")
    strategy = found.chosen(run.strategy)[0]
    silent: dict[str, bool] = {}

    def train(names: Sequence[str]) -> None:
        """Train from the seed, with the hooks of these names alone; note which of them did nothing."""
        made, some = make_experiment(run, found, strategy), build(run, found, only=names)
        with some.attached(made):
            manager = some.make_manager(loop_type=made.loop, on_error="raise") if some.hooks else None
            try:
                made.train(manager, {"strategy": strategy})
            finally:
                if manager is not None:
                    silent.update({name: did_nothing(manager, name) for name in manager.hooks})
                    manager.close()

    with process_settings(deterministic=run.determinism, matmul_precision=run.matmul_precision):
        audited = audit_training(train, [*(hook.name for hook in built.hooks), *specs], steps=steps)
    return replace(audited, silent=tuple(name for name, nothing in silent.items() if nothing))


# -- check: a run file, a list of hook specs, the settings of a server -----------------------------------------


@dataclass
class CheckOptions:
    """Check a run file, a list of hooks on modules, or the settings of a server (enable_hooks, hooks, forward_hooks).

    Nothing is attached or written; the modules that the file names are imported, and the options of hookline's own
    factories are tried. Other factories are not called. What a pattern matches in a model is shown by hookline find.

    Examples:
      hookline check run.yaml
      hookline check hooks.json
    """

    config: Annotated[str, Show("FILE", is_word=True)]
    """The file: .yaml, .toml, .json."""
    json: bool = False
    """Print JSON; what is said otherwise goes to the standard error."""


def check(arguments: Sequence[str]) -> int:
    """Print what a file means, or raise one error with everything that is wrong with it."""
    options = parse(CheckOptions, arguments, "check")
    from hookline.runs.documents import NO_HOOKS, is_server_file, placed_specs, read_document

    document = read_document(options.config)
    add_current_folder_to_path()
    plan: dict[str, Any] = {"file": options.config}
    with messages(), contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        warned: list[str] = []
        if isinstance(document.values, list) or is_server_file(document.values):
            specs = list(placed_specs(document, is_server=False, even_off=True).values())
            settings = document.values if isinstance(document.values, dict) else {}
            if settings.get("enable_hooks") is False and settings.get("hooks"):
                warned.append("enable_hooks is false: none of 'hooks' is attached.")
            if settings.get("enable_hooks") and not settings.get("hooks"):
                warned.append(f"{NO_HOOKS}.")
        else:
            specs = _of_run(options.config, plan)
        plan["hooks"] = [spec_row(spec) | {"enabled": spec.enabled} for spec in specs]
    if options.json:
        tell_json("check", plan | {"warnings": warned})
        return DONE
    tell_plan("check", plan, as_json=False)
    for text in warned:
        tell(f"warning: {text}")
    summary = f", but see the {counted(len(warned), 'warning')} above" if warned else ""
    tell(f"{options.config}: nothing is wrong with it{summary}.")
    return DONE


def _of_run(path: str, plan: dict[str, Any]) -> list[HookSpec]:
    """Read a run file as a run does before it trains; add what it means to the plan; return its specs."""
    from hookline.runs.build import hook_names
    from hookline.runs.find import make_config
    from hookline.runs.read import read

    run, found, *_ = read([path])
    if found is None:
        plan["command"] = shlex.join(run.command)
    else:
        config = make_config(run, found)
        plan |= {"experiment": found.name, "strategies": found.chosen(run.strategy)}
        plan["config"] = {} if config is None else to_plain(vars(config))
    plan["lifecycle_hooks"] = hook_names(run, found)
    return run.specs


def spec_row(spec: HookSpec) -> dict[str, Any]:
    """Return what a spec is."""
    return {"name": spec.name, "on": str(spec.on), "target_modules": list(spec.target_modules)}


# -- report: the page of runs ----------------------------------------------------------------------------------


_PAGE_EVERY: Final = 5.0
"""Seconds from one page of ``--live`` to the next, and until a page loads itself anew."""


@dataclass
class ReportOptions:
    """Make one HTML page of one or more runs; several are compared.

    Examples:
      hookline report runs/mod_arithmetic/random
      hookline report runs/mod_arithmetic                     # all runs in it
      hookline report runs/mod_arithmetic/random runs/mod_arithmetic/stride -o compared.html
      hookline report --live runs/mod_arithmetic              # while they go on
    """

    runs: Annotated[tuple[str, ...], Show("RUN ...", is_word=True)]
    """Folders of runs, or folders that hold runs."""
    output: Annotated[str | None, Show("FILE", short="-o")] = None
    """Where the page goes; report.html in the first folder if left out."""
    live: bool = False
    """Write the page again every few seconds while the runs go on; it loads itself anew."""


def report(arguments: Sequence[str]) -> int:
    """Make the page, and print where it is."""
    options = parse(ReportOptions, arguments, "report")
    if options.live:
        page = _follow(options)
    else:
        page = _write_report([_run_or_folder(run) for run in options.runs], options)
        tell(str(page.path))
    for line in [] if page is None else page.found:  # beside the path, which a shell may take
        print(f"  {line}", file=sys.stderr)
    return DONE


def _write_report(runs: Sequence[str | Path], options: ReportOptions, *, live: float = 0.0) -> WrittenPage:
    from hookline.report.report_page import write_page

    return write_page(runs, options.output, live=live)


def _follow(options: ReportOptions) -> WrittenPage | None:
    """Write the page again and again, until all runs have ended or Ctrl-C; the last one does not load itself anew."""
    page = None
    try:
        while page is None or not page.is_over:
            began, is_first = time.monotonic(), page is None
            page = _write_report(options.runs, options, live=_PAGE_EVERY)
            if is_first:
                tell(str(page.path))
                tell(f"It is written every {_PAGE_EVERY:g} seconds. Ctrl-C ends that.")
            time.sleep(0 if page.is_over else max(_PAGE_EVERY, 9 * (time.monotonic() - began)))  # a tenth of one core
    except KeyboardInterrupt:
        tell("Ended.")
        return None if page is None else _write_report(options.runs, options)
    return page


def _run_or_folder(path: str) -> Path:
    """Return the folder of the run at ``path``, or ``path`` itself if it holds several runs."""
    from hookline.report.report_runs import find_runs

    folder = Path(path)
    return folder if folder.is_dir() and len(find_runs([folder])) > 1 else run_folder(folder)


# -- compare: where two runs part ------------------------------------------------------------------------------


@dataclass
class CompareOptions:
    """Find where two runs part, and whether that is rounding or a bug.

    Exit codes: 0 the same within the thresholds (or rounding), 1 they differ, 2 they cannot be compared.

    Examples:
      hookline compare trace_a trace_b
      hookline compare trace_a trace_b --noise trace_float64 --html compared.html
      hookline compare trace_a trace_b --threshold 'layers.#.mlp=1e-3' --threshold 'lm_head=max_abs:0.1' --json
    """

    a: Annotated[str, Show("A", is_word=True)]
    """The reference: the folder of a trace, a safetensors file, or a folder of .npy files."""
    b: Annotated[str, Show("B", is_word=True)]
    """The run in question."""
    atol: Annotated[float | None, Show("NUMBER")] = None
    """Allow each number to differ by this much."""
    rtol: Annotated[float | None, Show("NUMBER")] = None
    """Allow each number to differ by this part of it."""
    threshold: Annotated[tuple[str, ...], Show("PATTERN=BOUND ...")] = ()
    """Bounds for sites: a relative error, or MEASURE:NUMBER[,…] with rel, rel_diff, max_abs or mean_abs."""
    noise: Annotated[tuple[str, ...], Show("PATH ...")] = ()
    """Other traces of A that differ by rounding alone (float64, repeated, permuted): what is noise at each site."""
    json: bool = False
    """Print everything as JSON."""
    html: Annotated[str | None, Show("FILE")] = None
    """Write a page with a map of layers and calls, which opens from disk."""


def compare(arguments: Sequence[str]) -> int:
    """Print where the runs part; return 0 if they do not, 1 if they do."""
    options = parse(CompareOptions, arguments, "compare")
    from hookline.debug.compare.compare import compare as compare_runs
    from hookline.debug.compare.judge import parse_thresholds

    thresholds, noise = parse_thresholds(options.threshold), list(options.noise) or None
    found = compare_runs(options.a, options.b, atol=options.atol, rtol=options.rtol, thresholds=thresholds, noise=noise)
    tell_found("compare", found.to_json(), found, as_json=options.json)
    if options.html is not None:
        try:
            page = found.write_html(options.html)
        except OSError as error:
            raise OptionError(f"--html {options.html}: the page cannot be written ({error}).") from error
        if not options.json:
            tell(f"The page is {page}.")
    return DONE if found.ok else FAILED


# -- parity: how far trainer and engine are apart, and why ------------------------------------------------------


@dataclass
class ParityOptions:
    """Compare the log-probs of a trainer's model and an engine for the same tokens, and say where they part.

    Exit codes: 0 nothing beyond what rounding explains, 1 there is more, 2 they cannot be compared.

    Examples:
      hookline parity --trainer models/llama --engine http://localhost:8000 --prompts prompts.txt
      hookline parity --trainer models/llama --engine vllm:models/llama --prompts rollouts.jsonl --html parity.html
      hookline parity --trainer new --engine http://localhost:8000 --prompts p.txt --healthy first.json
    """

    trainer: Annotated[str, Show("FOLDER")]
    """The trainer's model: a folder of save_pretrained."""
    engine: Annotated[str, Show("URL|vllm:FOLDER|FOLDER")]
    """A server of hookline or vLLM, vLLM started here, or a folder that is served here."""
    prompts: Annotated[str, Show("FILE")]
    """A prompt on each line; in a .jsonl file each line is a text, token ids, or an object with prompt, completion."""
    new_tokens: Annotated[int, Show("NUMBER")] = 64
    """How many tokens the engine adds to each prompt."""
    temperature: Annotated[float, Show("NUMBER")] = 1.0
    """At which the engine samples."""
    max_outside: Annotated[float | None, Show("SHARE")] = None
    """Fail too if more ratios than this leave [0.9, 1.1]."""
    healthy: Annotated[str | None, Show("FILE")] = None
    """Compare errors of layers with those of a healthy pair."""
    save_healthy: Annotated[str | None, Show("FILE")] = None
    """Take this pair for healthy, and save its errors."""
    html: Annotated[str | None, Show("FILE")] = None
    """Write a page, which opens from disk."""
    json: bool = False
    """Print everything as JSON."""


def parity(arguments: Sequence[str]) -> int:
    """Print how far trainer and engine are apart; return 0 if rounding explains it, 1 if not."""
    options = parse(ParityOptions, arguments, "parity")
    prompts = _read_prompts(options.prompts)
    from hookline.debug.parity.parity import parity as compare

    how: Any = {name: getattr(options, name) for name in ("new_tokens", "temperature", "healthy")}
    how["progress"] = lambda text: print(f"hookline: {text}", file=sys.stderr, flush=True)
    found = compare(options.trainer, options.engine, prompts, **how)
    if options.save_healthy is not None:
        found.save_healthy(options.save_healthy)
    tell_found("parity", found.to_json(), found, as_json=options.json)
    if options.html is not None:
        found.write_html(options.html)
    is_inside = options.max_outside is None or found.gap.outside <= options.max_outside
    return DONE if found.ok and is_inside else FAILED


def _read_prompts(path: str) -> list[Any]:
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        return [json.loads(line) for line in lines] if path.endswith(".jsonl") else lines
    except (OSError, ValueError) as error:
        raise OptionError(f"--prompts {path} cannot be read: {error}") from None


# -- replay: the records of a run to another sink --------------------------------------------------------------


_PATHS: Final = ("filepath", "path", "log_dir", "dir", "tracking_uri")
"""The arguments of sinks that say where they write."""


@dataclass
class ReplayOptions:
    """Feed the records of a run to another sink, after the run or while it lasts.

    Examples:
      hookline replay runs/mod_arithmetic/random --to tensorboard
      hookline replay runs/mod_arithmetic/random --to csv --into metrics.csv
      hookline replay runs/mod_arithmetic/random --to wandb --project grokking
    """

    run: Annotated[str, Show("RUN", is_word=True)]
    """The folder of a run, or its records.jsonl."""
    to: Annotated[str, Show("SINK|PKG.MOD:CLASS")]
    """The sink that gets the records: csv, jsonl, parquet, tensorboard, mlflow, wandb, prometheus, console, memory,
    or one of your own."""
    into: Annotated[str | None, Show("PATH")] = None
    """The file or folder (for mlflow a file, FILE.db); in the run's folder if left out."""
    project: Annotated[str | None, Show("PROJECT")] = None
    """The project, for wandb; the experiment's name if left out."""


def replay(arguments: Sequence[str]) -> int:
    """Feed the records of the run to the sink, and print where they went."""
    options = parse(ReplayOptions, arguments, "replay")
    folder = run_folder(options.run)
    if not (folder / LOG).exists():
        raise OptionError(f"{folder} has no {LOG}: a run without hooks has no records to replay.")
    from hookline.records.log import replay as replay_log
    from hookline.runs.build import sink_class

    cls = sink_class(options.to)
    sink = cls(**_sink_arguments(cls, options, folder))

    # The contexts of the log name the folder in which the run was made; it may have been moved or copied since.
    replay_log(folder / LOG, sink, context={"run_dir": str(folder)})
    files = ", ".join(map(str, getattr(sink, "files", ()))) or options.into
    tell(f"{folder / LOG} is replayed to {options.to}{f', into {files}' if files else ''}.")
    return DONE


def _sink_arguments(cls: Any, options: ReplayOptions, folder: Path) -> dict[str, Any]:
    """Return the arguments that make a sink of class ``cls``."""
    takes = inspect.signature(cls).parameters
    found: dict[str, Any] = {}
    if options.into is not None:
        name = next((name for name in _PATHS if name in takes), None)
        if name is None:
            raise OptionError(f"--into: {cls.__name__} does not write to a path; leave it out.")
        found[name] = options.into
    if "project" in takes:
        found["project"] = options.project or read_run_json(folder).get("experiment", "hookline")
    elif options.project is not None:
        raise OptionError(f"--project goes with --to wandb, not with {options.to}.")
    return found


# -- new: a file to start from ---------------------------------------------------------------------------------


_NEXT: Final = {
    "experiment": "hookline run {named} --hooks norms --hook-csv",
    "hook": "hookline run mod_arithmetic --epochs 3 --hooks {named}",
    "sink": "hookline run mod_arithmetic --epochs 3 --hooks --hook-sink {named}",
}


@dataclass
class NewOptions:
    """Write a file to start from: an experiment, a hook or a sink. It runs as it is.

    Examples:
      hookline new experiment parity.py
      hookline new hook weight_norm.py
    """

    kind: Annotated[Literal["experiment", "hook", "sink"], Show(is_word=True)]
    """What it is."""
    file: Annotated[str, Show("FILE", is_word=True)]
    """Where it goes; its name gives the class its name."""


def new(arguments: Sequence[str]) -> int:
    """Write the file, and print how to try it."""
    options = parse(NewOptions, arguments, "new")
    path, cls = _write_template(options.kind, options.file)
    tell(f"{path} has the {options.kind} {cls}. Try it:")
    tell(f"  {_NEXT[options.kind].format(named=shlex.quote(f'{path}:{cls}'))}")
    return DONE


def _write_template(kind: str, file: str) -> tuple[Path, str]:
    """Write a template; return its path, and the name of its class."""
    path = Path(file if file.endswith(".py") else f"{file}.py")
    name = re.sub(r"\W+", "_", path.stem).strip("_").lower()
    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if not cls.isidentifier():
        raise OptionError(f"A class cannot be named after {path.name!r}: begin it with a letter.")
    if path.exists():
        raise OptionError(f"{path} is there already; take another name.")
    template = importlib.resources.files("hookline.cli").joinpath("templates", f"{kind}.py.txt")
    text = Template(template.read_text(encoding="utf-8")).substitute(Class=cls, name=name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path, cls
