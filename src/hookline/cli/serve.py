"""Serve a causal language model over HTTP, with hooks on it: ``hookline serve --model PATH``.

`main` calls `serve`, which gives settings, specs from files and a way to make the engine to the server of
`hookline.serve.http`. Imports neither torch nor the packages of ``hookline[serve]`` before it serves.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from hookline.cli.main import DONE, FAILED
from hookline.cli.screen import messages
from hookline.errors import ConfigError, HooklineError, NoMatchError, OptionError
from hookline.runs.flags import Show, parse

if TYPE_CHECKING:
    from hookline.serve import Engine, Settings

logger = logging.getLogger("hookline.serve")

_TOKEN: Final = "HOOKLINE_SERVE_TOKEN"
_ALLOWED: Final = ("hookline.factories",)


@dataclass
class ServeOptions:
    """Serve a causal language model from a local folder over HTTP, with hooks on it.

    Examples:
      hookline serve --model models/llama
      hookline serve --model models/llama --hooks hooks.json --port 8000
      HOOKLINE_SERVE_TOKEN=secret hookline serve --model models/llama --export-dir exports   # hooks over HTTP
    """

    model: Annotated[str | None, Show("PATH")] = None
    """The folder of the model, as transformers saves it; if left out, model_path of the server's settings."""
    server_args: Annotated[str | None, Show("FILE")] = None
    """Settings of the server with enable_hooks and hooks, or forward_hooks: .json, .yaml, .toml."""
    hooks: Annotated[str | None, Show("FILE")] = None
    """Hooks to start with, as data: a list of name, target_modules, hook_factory, config."""
    no_strict: bool = False
    """Go on if a pattern in these files matches nothing: a warning names the nearest modules. If left out, that is an
    error, with exit code 2."""
    host: Annotated[str, Show("ADDRESS")] = "127.0.0.1"
    """Where to listen. An address that others reach needs a token, which then protects everything."""
    port: Annotated[int, Show("PORT")] = 8000
    """0 takes one that is free, and prints it."""
    device: Annotated[str | None, Show("DEVICE")] = None
    """cpu, cuda, cuda:1; if left out, the GPU if there is one."""
    dtype: Annotated[str | None, Show("DTYPE")] = None
    """float32, bfloat16, float16; if left out, what the model was saved in."""
    max_batch: Annotated[int, Show("N")] = 32
    """The most sequences in one forward."""
    max_waiting: Annotated[int, Show("N")] = 256
    """The most sequences that wait for their turn; more are told to come back (429)."""
    max_sequence: Annotated[int | None, Show("N")] = None
    """The most tokens of prompt and answer; if left out, as many as the model was made for."""
    captured_bytes: Annotated[int, Show("BYTES")] = 1 << 30
    """The most memory for hidden states of all requests, until they are sent."""
    served_model_name: Annotated[str | None, Show("NAME")] = None
    """What clients call the model; the folder's name if left out."""
    no_tokenizer: bool = False
    """Load no tokenizer: prompts are token ids, answers have no text, and ids with return_token_ids."""
    chat_template: Annotated[str | None, Show("FILE")] = None
    """A chat template in Jinja, for a model that has none or another; runs in a sandbox."""
    allow: Annotated[tuple[str, ...], Show("PREFIX ...")] = ()
    """What paths of factories may begin with, of those who have the token, and in files. If left out:
    hookline.factories over HTTP, anything in files."""
    allow_requests: Annotated[tuple[str, ...], Show("PREFIX ...")] = ()
    """What paths of factories of hooks in the bodies of requests may begin with, beside hookline.factories: whoever
    may generate can call all that begins so."""
    token_file: Annotated[str | None, Show("FILE")] = None
    """A file with the token that changes of hooks over HTTP need; if left out, the environment variable
    HOOKLINE_SERVE_TOKEN has it."""
    protect: Annotated[Literal["hooks", "everything"] | None, Show("hooks|everything")] = None
    """What needs the token: changing hooks, or everything but /health. If left out: hooks on this machine's own
    address, everything on others."""
    without_token: bool = False
    """Listen at an address that others reach although there is no token."""
    export_dir: Annotated[str | None, Show("DIR")] = None
    """Where files of hooks that come over HTTP have to lie; without it they get no files."""
    max_body: Annotated[int, Show("BYTES")] = 4 << 20
    """The largest body of a request."""
    drain: Annotated[float, Show("SECONDS")] = 30.0
    """How long running requests may take after SIGTERM or Ctrl-C. A second signal ends everything at once."""


def serve(arguments: Sequence[str]) -> int:
    """Serve until a signal comes."""
    options = parse(ServeOptions, arguments, "serve")
    from hookline.serve import Server

    with messages():
        model, specs = _model_and_specs(options)
        settings = _settings(options, model)
        maker = _maker(options, model, specs)
        ended_well = Server(maker, settings, host=options.host, port=options.port).serve()
    return DONE if ended_well else FAILED


# -- flags -----------------------------------------------------------------------------------------------------


def _model_and_specs(options: ServeOptions) -> tuple[Path, list[Any]]:
    """Return where the model is, and the hooks of both files."""
    from hookline.runs.documents import NO_HOOKS, specs_of_file
    from hookline.sglang.server_args import ServerArgs

    model, specs = options.model, []
    if options.server_args is not None:
        args = ServerArgs.from_file(options.server_args)
        model, specs = model or getattr(args, "model_path", None), args.hook_specs()
        if args.enable_hooks and not args.hooks:
            logger.warning(NO_HOOKS)
    if not model:
        raise OptionError("hookline serve needs a model: hookline serve --model PATH.")
    if options.hooks is not None:
        specs = [*specs, *specs_of_file(options.hooks)]
    return Path(str(model)).expanduser(), specs


def _settings(options: ServeOptions, model: Path) -> Settings:
    from hookline.serve import Settings
    from hookline.serve.http.local_access import is_loopback

    token = _token(options)
    is_open = not is_loopback(options.host)
    if is_open and token is None and not options.without_token:
        raise OptionError(
            f"{options.host} is an address that others may reach, and there is no token. Give one with --token-file "
            f"FILE or {_TOKEN}, listen at 127.0.0.1, or say --without-token."
        )
    return Settings(
        model_name=options.served_model_name or model.resolve().name,
        token=token,
        protect=options.protect or ("everything" if is_open and token is not None else "hooks"),
        allow=options.allow or _ALLOWED,
        allow_requests=options.allow_requests,
        export_dir=None if options.export_dir is None else _folder(options.export_dir),
        max_body=options.max_body,
        max_sequences=max(1, min(64, options.max_waiting)),
        drain_s=options.drain,
    )


def _token(options: ServeOptions) -> str | None:
    """Return the token of the file, or of the environment."""
    if options.token_file is not None:
        return _text("--token-file", options.token_file).strip()
    return os.environ.get(_TOKEN) or None


def _text(name: str, path: str) -> str:
    """Return the text of the file that the flag `name` gives."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise OptionError(f"{name} {path} cannot be read: {said}.") from None


def _folder(given: str) -> Path:
    folder = Path(given).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--export-dir {given} cannot be made: {error.strerror}.") from None
    return folder.resolve()


# -- the engine ------------------------------------------------------------------------------------------------


def _maker(options: ServeOptions, model: Path, specs: Sequence[Any]) -> Callable[[], Engine]:
    """Return what loads the model and attaches the hooks of the files; the server calls it once it answers."""
    if options.no_tokenizer and options.chat_template is not None:
        raise OptionError("--chat-template is for text, and --no-tokenizer serves none; leave one of them out.")
    template = None if options.chat_template is None else _text("--chat-template", options.chat_template)

    def make() -> Engine:
        from hookline.serve import Engine, load

        if not sys.stderr.isatty():  # a progress bar is one long line in a file
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        logger.info("loading %s", model)
        made, tokenizer = load(
            model, dtype=options.dtype or "auto", device=options.device, with_tokenizer=not options.no_tokenizer
        )
        if template is not None:
            tokenizer.chat_template = template
        engine = Engine(
            made,
            tokenizer,
            max_batch=options.max_batch,
            max_waiting=options.max_waiting,
            max_sequence=options.max_sequence,
            captured_bytes=options.captured_bytes,
            allow=options.allow or None,
        )
        _attach(engine, specs, strict=not options.no_strict)
        return engine

    return make


def _attach(engine: Engine, specs: Sequence[Any], *, strict: bool) -> None:
    """Attach the hooks of files, all or none.

    Without ``strict``, what matches nothing is passed over, as SGLang does it, with a warning.
    """
    try:
        engine.hooks.add_all(specs, strict=strict)
    except NoMatchError as error:
        error.add_note("With --no-strict, such a hook is passed over.")
        raise
    except HooklineError:
        raise
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        raise ConfigError(f"A hook cannot be attached: {type(error).__name__}: {error}. {notes}".strip()) from error
