"""Attach, list and remove hooks over HTTP, between two forwards; and write the page of their metrics.

`HookPaths` has the routes; `LiveHookPaths` asks the `LiveHooks` of our engine, and the endpoints of another engine its
workers. `metrics_page` is the page in Prometheus' format, of the engine and its hooks.
A spec that comes over HTTP is not trusted: its factory has to be on the allow-list, its paths in the export folder.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hookline.engines.live_hooks import ready_name
from hookline.engines.request_options import ClientHook
from hookline.errors import HooklineError, NotAllowedError, OptionError
from hookline.factories import FILE_OPTIONS
from hookline.serve.http.error_answers import Refused, json_response
from hookline.serve.http.request_gate import Settings

if TYPE_CHECKING:
    from hookline.serve.http.app import Serving

logger = logging.getLogger("hookline.serve")

PATIENCE_S: Final = 60.0
"""How long a route waits for its turn between two forwards; in vLLM, for the workers."""


def _confined(given: ClientHook, folder: Path | None) -> ClientHook:
    """Return the hook to attach, with its paths inside `folder`, which is also the default folder to write to.

    Raises:
        NotAllowedError: It names a factory or a path that HTTP clients may not use.
    """
    name = ready_name(given.hook_factory)
    config = dict(given.config)
    for option in FILE_OPTIONS[name] if name is not None else ():
        path = config.get(option)
        if path is None and option != "folder":
            continue
        if folder is None:
            raise NotAllowedError(
                f"{name} has a {option}, and the server was started without an export folder (--export-dir; on vLLM, "
                "export_dir in --additional-config), so that hooks which come over HTTP have no files."
            )
        config[option] = str(_inside(folder, "." if path is None else path, option))
    return replace(given, config=config)


def _inside(folder: Path, given: Any, option: str) -> Path:
    if not isinstance(given, str) or "\0" in given:
        raise OptionError(f"{option} is a path, got {given!r}.")
    root = folder.resolve()
    path = (root / given).resolve()  # links are followed: one that leads out is out
    if path != root and root not in path.parents:
        raise NotAllowedError(f"{option} has to lie in the server's export folder, and {given!r} does not.")
    return path


class HookPaths:
    """Attach, list and remove hooks over HTTP, the same for every engine.

    The docstring of a route is its description in ``/openapi.json``.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # -- of one engine: hooks are dictionaries as ``LiveHook.to_plain`` makes them -----------------------------

    async def all(self) -> list[dict[str, Any]]:
        """Return the attached hooks."""
        raise NotImplementedError

    async def attach(self, given: ClientHook) -> dict[str, Any]:
        """Attach one hook, wholly or not at all."""
        raise NotImplementedError

    async def detach(self, id: str) -> dict[str, Any]:
        """Remove one hook; raise `HookNameError` for an id that there is not."""
        raise NotImplementedError

    async def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return what each hook itself measures, by its id."""
        raise NotImplementedError

    # -- routes ------------------------------------------------------------------------------------------------

    def add_to(self, app: Any) -> None:
        """Add the paths to `app`."""
        app.add_api_route("/hooks", self.list_hooks, methods=["GET"])
        app.add_api_route("/hooks", self.add_hook, methods=["POST"], status_code=201)
        app.add_api_route("/hooks/{id}", self.remove_hook, methods=["DELETE"])

    async def list_hooks(self) -> Any:
        """List the attached hooks: on which modules, how often each fired, and what it costs."""
        return json_response({"hooks": [self._shown(each) for each in await self.all()]})

    async def add_hook(self, body: ClientHook) -> Any:
        """Attach a hook to the running model, between two forwards; wholly, or not at all."""
        hook = await self.attach(_confined(body, self.settings.export_dir))
        logger.info("hook %s (%s) is attached: %s", hook["id"], hook["hook_factory"], ", ".join(hook["matched"]))
        return json_response(self._shown(hook), 201)

    async def remove_hook(self, id: str) -> Any:
        """Remove a hook, also one of the server's start; return what it has done until now."""
        hook = await self.detach(id)
        logger.info("hook %s is taken off", id)
        return json_response(self._shown(hook))

    async def figures(self) -> Sequence[HookFigures]:
        """Return each hook with its metrics."""
        metrics = await self.metrics()
        return [(each, metrics.get(each["id"], {})) for each in await self.all()]

    def _shown(self, hook: Mapping[str, Any]) -> dict[str, Any]:
        """Return a hook as clients see it: paths in the export folder are relative to it, as they were sent."""
        config = dict(hook["config"])
        root = None if self.settings.export_dir is None else self.settings.export_dir.resolve()
        for option in FILE_OPTIONS.get(re.split("[:.]", hook["hook_factory"])[-1], ()):
            given = config.get(option)
            if root is not None and isinstance(given, str) and Path(given).is_relative_to(root):
                config[option] = str(Path(given).relative_to(root))
        return {**hook, "config": config}


class LiveHookPaths(HookPaths):
    """The hook paths of our own engine."""

    def __init__(self, serving: Serving, settings: Settings) -> None:
        super().__init__(settings)
        self.serving = serving

    async def all(self) -> list[dict[str, Any]]:
        """Return the attached hooks."""
        return [live.to_plain() for live in self.serving.ready().hooks.list()]

    async def attach(self, given: ClientHook) -> dict[str, Any]:
        """Attach one hook between two forwards; in a thread, which waits for the running one."""
        add = partial(self.serving.ready().hooks.add, given, allow=self.settings.allow, patience_s=PATIENCE_S)
        try:
            return (await asyncio.to_thread(add)).to_plain()
        except HooklineError:
            raise
        except Exception as error:  # the factory's own, or that of importing it
            logger.info("hook %r was not attached", given.name, exc_info=error)
            said = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise Refused(400, f"{given.hook_factory!r} made no hook: {said}.", param="$.hook_factory") from error

    async def detach(self, id: str) -> dict[str, Any]:
        """Remove one hook between two forwards."""
        remove = partial(self.serving.ready().hooks.remove, id, patience_s=PATIENCE_S)
        return (await asyncio.to_thread(remove)).to_plain()

    async def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return what the hooks measure; clients may ask as often as they like."""
        return await self.serving.on_engine(self.serving.ready().hooks.metrics)


# -- the page of metrics -------------------------------------------------------------------------------------------

_NOW: Final = frozenset(
    {"requests_waiting", "requests_running", "captured_bytes_reserved", "captured_bytes_limit", "hooks"}
)
"""Counts of an engine that are of the moment; others only grow."""

HookFigures = tuple[Mapping[str, Any], Mapping[str, float]]
"""A live hook as ``GET /hooks`` shows it, and its own metrics."""


def metrics_page(counts: Mapping[str, float], hooks: Sequence[HookFigures]) -> Any:
    """Return the response with the counts of an engine, and its hooks."""
    families = [*_engine_families(counts), *_hook_families(hooks)]
    page = generate_latest(SimpleNamespace(collect=lambda: families))  # asked for nothing else
    return Response(page, media_type=str(CONTENT_TYPE_LATEST))


def _family(name: str, words: str, *, grows: bool, **options: Any) -> Any:
    return (CounterMetricFamily if grows else GaugeMetricFamily)(f"hookline_{name}", words, **options)


def _engine_families(counts: Mapping[str, float]) -> Iterator[Any]:
    for name, value in sorted(counts.items()):
        words = f"{name.replace('_', ' ')} of the engine, {'now' if name in _NOW else 'since its start'}"
        yield _family(f"engine_{name}", words, grows=name not in _NOW, value=float(value))


_OF_HOOKS: Final = (
    ("fired", "How often the hook ran", True),
    ("errors", "How often the hook raised", True),
    ("off", "1 if the hook is switched off because it raised", False),
    ("cost_us", "Microseconds of the host that one run takes, on average", False),
)


def _hook_families(hooks: Sequence[HookFigures]) -> Iterator[Any]:
    labels = ("hook", "name", "factory")
    named = [((hook["id"], hook["name"], hook["hook_factory"]), hook, metrics) for hook, metrics in hooks]
    for field, words, grows in _OF_HOOKS:
        family = _family(f"hook_{field}", words, grows=grows, labels=labels)
        for values, hook, _ in named:
            if hook[field] is not None:
                family.add_metric(values, float(hook[field]))
        yield family
    words = "What the hook itself measures since it was attached: a stat of a module, or of all if module is empty"
    found = _family("hook_metric", words, grows=False, labels=(*labels, "module", "stat"))
    for values, _, metrics in named:
        for metric, value in metrics.items():
            module, slash, stat = metric.partition("/")  # a metric of the hook as a whole has no module
            found.add_metric((*values, *((module, stat) if slash else ("", metric))), float(value))
    yield found
