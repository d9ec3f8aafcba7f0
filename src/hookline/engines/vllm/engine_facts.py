"""Say what kind of engine a worker belongs to, and in which way hooks can fire in it.

`WorkerHooks` reads `EngineFacts` once and asks `choose_way` for each hook. The facts are read from the
attributes of vLLM's configuration; nothing here imports vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hookline.engines.vllm.start_options import TAP
from hookline.errors import OptionError

__all__ = ["TESTED_VERSIONS", "EngineFacts", "Way", "check_taps", "choose_way"]

Way = Literal["eager", "on_demand", "tapped"]
"""How a hook fires: the model runs eagerly anyway; each step with hooks is run eagerly; in compiled code."""

TESTED_VERSIONS: Final = ("0.32.0",)
"""Versions of vLLM that `make test-vllm` has run."""


@dataclass(frozen=True)
class EngineFacts:
    """What a worker knows of its engine."""

    version: str
    is_compiled: bool
    graphs: str
    """``"none"``, ``"piecewise"`` or ``"full"``: which forwards are replayed as CUDA graphs."""
    runner: str
    """``"V1"`` or ``"V2"``: which of vLLM's two model runners."""
    rank: int
    tp_size: int
    """Into how many parts tensor parallelism cuts outputs."""
    is_staged: bool = False
    """Whether pipeline stages have a part of the layers each."""
    is_split_at_taps: bool = False
    """Whether the compiled graph is split at taps, so that CUDA graphs of its pieces leave them out."""

    @classmethod
    def of(cls, worker: Any) -> EngineFacts:
        """Return the facts of a worker of vLLM."""
        config = worker.vllm_config
        compilation = config.compilation_config
        return cls(
            version=str(getattr(sys.modules.get("vllm"), "__version__", "unknown")),
            is_compiled=bool(int(compilation.mode or 0)),
            graphs=_graphs(getattr(compilation, "cudagraph_mode", None)),
            runner="V2" if getattr(worker, "use_v2_model_runner", False) else "V1",
            rank=int(worker.rank),
            tp_size=int(getattr(config.parallel_config, "tensor_parallel_size", 1)),
            is_staged=int(getattr(config.parallel_config, "pipeline_parallel_size", 1)) > 1,
            is_split_at_taps=TAP in (getattr(compilation, "splitting_ops", None) or ()),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the facts as ``hookline_describe`` shows them."""
        names = ("rank", "tp_size", "version", "runner", "graphs", "notes")
        return {**{name: getattr(self, name) for name in names}, "compiled": self.is_compiled}

    @property
    def notes(self) -> list[str]:
        """Return what a user should know before trusting hooks in this engine."""
        found = []
        if self.version.split("+")[0] not in TESTED_VERSIONS:
            found.append(
                f"hookline was tested with vLLM {', '.join(TESTED_VERSIONS)}, and this is {self.version}: compare the "
                "hidden states of one prompt with transformers before you trust them"
            )
        if self.runner == "V2":
            found.append("the V2 model runner is supported from its sources and untested")
        if self.graphs != "none":
            found.append("CUDA graphs are supported from the sources and untested")
        return found


def choose_way(facts: EngineFacts) -> Way:
    """Return how hooks fire; raise where no way is left."""
    if facts.graphs == "full":  # a replayed CUDA graph calls no Python: a hook would be silent, and nobody be told
        raise OptionError(
            "This engine replays whole forwards as CUDA graphs, where no module is called and no hook can fire. Start "
            """it with --enforce-eager, or with --compilation-config '{"cudagraph_mode": "PIECEWISE"}'."""
        )
    if facts.is_staged:
        raise OptionError("This engine has pipeline stages, of which none has all layers; hooks need one stage.")
    return "on_demand" if facts.is_compiled else "eager"


def check_taps(facts: EngineFacts, taps: Sequence[str]) -> None:
    """Raise if taps were asked for, and would be silent in this engine."""
    if taps and facts.graphs == "piecewise" and not facts.is_split_at_taps:
        raise OptionError(
            f"CUDA graphs replay no tap unless the graph is split there. Start the engine with engine_options(taps=…), "
            f"or add {TAP!r} to splitting_ops of --compilation-config, after vLLM's own."
        )


def _graphs(mode: Any) -> str:
    """Return which CUDA graphs an engine replays, by the value of its ``cudagraph_mode``."""
    if mode is None or getattr(mode, "name", str(mode)) == "NONE":
        return "none"
    has_full = getattr(mode, "has_full_cudagraphs", None)
    is_full = has_full() if callable(has_full) else "FULL" in str(getattr(mode, "name", mode))
    return "full" if is_full else "piecewise"
