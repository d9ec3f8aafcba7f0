"""Print the script that makes bash complete hookline, and what could stand at the cursor when the script asks.

``hookline completion bash`` prints the script, which calls ``hookline __complete`` at every Tab. What a file says of an
experiment is read without running it: neither torch nor anything of the user's is imported (0.1 s).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from hookline.cli.main import COMMANDS, DONE
from hookline.cli.parse import parse
from hookline.config.run_options import flag

__all__ = ["CompletionOptions", "candidates", "completion", "print_candidates"]

_SETS: Final = ("all", "observers", "interventions", "with_debug", "none")
_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
_LOOP: Final = ("--epochs", "--steps", "--snapshot-every", "--eval-every")
_FILES: Final = ("FILE", "DIR", "PATH", "RUN", "RUN ...", "FILE:MODEL", "EXPERIMENT", "RUNFILE")
"""The words that stand for a file in the help of a flag."""
_BREAKS: Final = ":="
"""Where bash begins another word: it replaces only what follows."""
_BASH: Final = """\
# Completion of hookline for bash. What could stand at the cursor is asked of hookline itself.
_hookline() {
    local kind words=() files=()
    { IFS= read -r kind; mapfile -t words; } < <(
        "${1/#\\~/$HOME}" __complete "$COMP_LINE" "$COMP_POINT" "$COMP_WORDBREAKS" 2>/dev/null
    )
    if [[ $kind == files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t files < <(compgen -f -- "$2")
    fi
    COMPREPLY=("${words[@]}" "${files[@]}")
    # A hook is followed by its argument, a file by what is in it.
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *@(.|.py) ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _hookline hookline
"""


@dataclass
class CompletionOptions:
    """Print what makes bash complete hookline's commands, flags, hooks, experiments and files.

    Examples:
      hookline completion bash > ~/.local/share/bash-completion/completions/hookline
      eval "$(hookline completion bash)"                      # in this shell alone
    """

    shell: Annotated[Positional[Literal["bash"]], flag()]
    """Which shell; bash 4 or later is the one there is."""


def completion(arguments: Sequence[str]) -> int:
    """Print the script."""
    parse(CompletionOptions, arguments, "completion")
    print(_BASH, end="")
    return DONE


@dataclass
class Candidates:
    """Hold what could stand at the cursor."""

    words: list[str] = field(default_factory=list)
    has_files: bool = False
    """Whether file names could, too."""


def print_candidates(arguments: Sequence[str]) -> int:
    """Print candidates for ``LINE POINT BREAKS``, one in a line, after a line that says whether files are some."""
    line, point, breaks = arguments
    words = _words(line.encode()[: int(point)].decode(errors="ignore"))  # bash counts bytes
    found = candidates(words[1:])
    start = max((words[-1].rfind(sign) for sign in _BREAKS if sign in breaks), default=-1) + 1
    print("files" if found.has_files else "words")
    for word in dict.fromkeys(found.words):
        if word.startswith(words[-1]):
            print(word[start:])
    return DONE


def _words(line: str) -> list[str]:
    """Return the words of a line, the last being the one under the cursor, which may be empty."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote that is still open
        words = line.split()
    return words if words and not line[-1:].isspace() else [*words, ""]


def candidates(words: Sequence[str]) -> Candidates:
    """Return what could stand in place of the last of the words behind ``hookline``."""
    if len(words) <= 1:
        return Candidates([*COMMANDS, "--help", "--version", "--debug"])
    options = _options_of(words[0])
    if options is None:
        return Candidates()
    return _Command(words[0], options).candidates(words[1:-1], words[-1])


class _Command:
    """The flags of one command, and what each takes."""

    def __init__(self, name: str, options: type) -> None:
        self.name = name
        self.flags: dict[str, Any] = {}
        self.positional: list[Any] = []
        self._collect(options)

    def _collect(self, cls: type) -> None:
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                self._collect(hint)
            elif _is_positional(hint):
                self.positional.append((name, hint))
            else:
                self.flags[f"--{name.replace('_', '-')}"] = hint

    def candidates(self, before: Sequence[str], word: str) -> Candidates:
        """Return the candidates for `word`, which follows the words `before`."""
        look = self._experiment(before)
        name = next((one for one in reversed(before) if one.startswith("-")), None)
        if word.startswith("-"):
            own = [*look.flags, *(_LOOP if self.name == "run" and not look.flags else ())]
            return Candidates([*own, *self.flags, "--help"])
        behind = list(reversed(before)).index(name) if name is not None else len(before)
        hint = self.flags.get(name or "")
        if hint is not None and _takes(hint, behind):
            return self._values(name or "", hint, look, word)
        if name is not None and hint is None and behind == 0 and name in look.flags:
            return Candidates()
        return self._position(len(self._without_values(before)), word)

    def _without_values(self, before: Sequence[str]) -> list[str]:
        """Return the words that are neither flags nor their values."""
        found: list[str] = []
        name, since = "", 0
        for word in before:
            if word.startswith("-"):
                name, since = word, 0
            elif name and (_takes(self.flags[name], since) if name in self.flags else since == 0):
                since += 1
            else:
                found.append(word)
        return found

    def _experiment(self, before: Sequence[str]) -> SourceLook:
        found = self._without_values(before)
        return look_at_source(found[0]) if self.name == "run" and found else SourceLook()

    def _position(self, place: int, word: str) -> Candidates:
        if place >= len(self.positional):
            last = self.positional[-1:] if self.positional and "..." in _metavar(self.positional[-1][1]) else []
        else:
            last = [self.positional[place]]
        if not last:
            return Candidates()
        name, hint = last[0]
        if self.name == "hooks":
            return _in_file(word) or Candidates([*_hooks(), *_SETS[:-1]])
        if name == "experiment" or (self.name in ("find", "doctor") and name == "model"):
            from hookline.experiments import EMBEDDED

            return _in_file(word) or Candidates([*EMBEDDED], has_files=True)
        return _words_of(hint)

    def _values(self, name: str, hint: Any, look: SourceLook, word: str) -> Candidates:
        known: dict[str, Callable[[], list[str]]] = {
            "--hooks": lambda: [*_hooks(), *_SETS],
            "--hooks-describe": lambda: [*_hooks(), *_SETS[:-1]],
            "--with-hooks": lambda: [*(look.groups or ["none"])],
            "--strategy": lambda: [*look.strategies, "all"],
            "--hook-config": lambda: [f"{hook}." for hook in _hooks()],
            "--dtype": lambda: [*_DTYPES],
            "--device": lambda: ["cpu", "cuda", "mps"],
            "--to": _sinks,
            "--hook-sink": _sinks,
        }
        if name in known and (self.name, name) != ("serve", "--hooks"):
            words = known[name]()
            # A hook may be in a file; a word that begins no hook may begin a file's name.
            return _in_file(word) or Candidates(words, has_files=not any(one.startswith(word) for one in words))
        return _in_file(word) or _words_of(hint)


def _options_of(name: str) -> type | None:
    if name not in COMMANDS:
        return None
    module = "hookline.config.run_options" if name == "run" else COMMANDS[name][0]
    found: type = getattr(importlib.import_module(module), f"{name.capitalize()}Options")
    return found


def _is_positional(hint: Any) -> bool:
    marker = get_args(Positional[str])[1]
    return any(one is marker for one in _marks(hint))


def _marks(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _metavar(hint: Any) -> str:
    found = [getattr(mark, "metavar", None) for mark in _marks(hint)]
    return next((one for one in found if isinstance(one, str)), "")


def _takes(hint: Any, place: int) -> bool:
    """Return whether a flag takes a value at that place behind it."""
    if bool in get_args(hint) or hint is bool:
        return False
    return place == 0 or "..." in _metavar(hint)


def _words_of(hint: Any) -> Candidates:
    """Return the words that a value may be, by its type or by what help calls it."""
    metavar = _metavar(hint)
    if metavar.removesuffix(" | -- COMMAND") in _FILES:
        return Candidates(has_files=True)
    literal = [word for one in (hint, *get_args(hint)) for word in get_args(one) if get_origin(one) is Literal]
    if literal:
        return Candidates([str(word) for word in literal])
    words = metavar.strip("[]").split("|")
    return Candidates(words if len(words) > 1 else [])


def _in_file(word: str) -> Candidates | None:
    """Return what the file defines, for ``file.py:``; None for another word."""
    where, colon, _ = word.rpartition(":")
    if not colon or not where.endswith(".py"):
        return None
    return Candidates([f"{where}:{name}" for name in names_in(Path(where))])


def _hooks() -> list[str]:
    from importlib.metadata import entry_points

    from hookline.analyses import BUILT_IN

    return [*BUILT_IN, *(point.name for point in entry_points(group="hookline.hooks"))]


def _sinks() -> list[str]:
    from hookline.config.named_sinks import sink_names

    return sink_names()


# -- experiments, read and not run -----------------------------------------------------------------------------


@dataclass
class SourceLook:
    """Hold what the file of an experiment says."""

    flags: list[str] = field(default_factory=list)
    """The fields of its configuration, as flags."""
    strategies: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


def names_in(path: Path) -> list[str]:
    """Return the classes and functions that a file defines."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in _body(path) if isinstance(node, kinds) and not node.name.startswith("_")]


def look_at_source(experiment: str) -> SourceLook:
    """Return what the experiment of that name, or at ``file.py:Class``, says; nothing where it cannot be read."""
    from hookline.experiments import EMBEDDED

    where, colon, name = EMBEDDED.get(experiment, experiment).rpartition(":")
    where = where if colon else experiment
    body = _body(_file(where))
    by_name = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    node = by_name.get(name) if name else next((one for one in by_name.values() if _value(one, "hook_sets")), None)
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return SourceLook([_as_flag(one.arg) for one in arguments if one.arg != "strategy"])
    if node is None:
        return SourceLook()
    config = _value(node, "config_class")
    cls = by_name.get(config.id) if isinstance(config, ast.Name) else None
    found = SourceLook([_as_flag(name) for name in _fields(cls)])
    found.strategies = list(_texts(getattr(_value(node, "strategies"), "elts", ())))
    found.groups = list(_texts(getattr(_value(node, "hook_sets"), "keys", ())))
    return found


def _file(where: str) -> Path:
    if where.endswith(".py"):
        return Path(where)
    if not where.startswith("hookline.") and not all(part.isidentifier() for part in where.split(".")):
        return Path()
    top, *rest = where.split(".")
    spec = importlib.util.find_spec(top)  # of the outermost package alone: those below would be imported
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0], *rest).with_suffix(".py") if folders and rest else Path(f"{top}.py")


def _body(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _value(node: ast.AST, name: str) -> ast.expr | None:
    """Return what a name is set to in the body of a class."""
    for line in getattr(node, "body", ()):
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            value: ast.expr | None = line.value
            return value
    return None


def _fields(cls: ast.AST | None) -> Iterator[str]:
    for line in getattr(cls, "body", ()):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[:1] != "_":
            yield line.target.id


def _texts(nodes: object) -> Iterator[str]:
    for node in nodes if isinstance(nodes, list | tuple) else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
