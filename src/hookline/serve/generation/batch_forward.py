"""One forward of the model for a batch, with everything that has to be said around it.

Takes token ids, positions and a mask from ``batch``, hands back the logits of the last column; while the model runs,
hooks can ask ``factories.batch_rows.current_rows`` whose rows they see, and ``states`` gathers what was asked for.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import MissingPackageError, OptionError
from hookline.factories.batch_rows import BatchRows, serving
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.modules.module_hooks import existing_hooks
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.serve.generation.hidden_states import Gatherer
    from hookline.serve.generation.request_row import Row

__all__ = ["Forward", "is_compiled"]


class Forward:
    """Calls a causal language model of ``transformers``, in the way that its signature allows."""

    def __init__(self, model: nn.Module, gatherer: Gatherer | None = None) -> None:
        inner: Any = unwrap(model)
        takes = inspect.signature(inner.forward).parameters
        missing = [
            name for name in ("input_ids", "attention_mask", "past_key_values", "use_cache") if name not in takes
        ]
        if missing or not hasattr(inner, "get_input_embeddings"):
            raise OptionError(
                f"A causal language model of transformers can be served, got {type_name(inner)}"
                f"{f', whose forward takes no {missing[0]}' if missing else ''}."
            )
        self.model = model
        self.gatherer = gatherer
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        embedding = inner.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.device: torch.device = embedding.weight.device
        head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        self._ends = [module for module in (inner, head) if module is not None]
        """The modules that see logits, of all columns only if somebody looks."""
        self._takes_positions = "position_ids" in takes
        self._may_keep_last = "logits_to_keep" in takes
        self._new_cache = _cache_class()
        self.is_compiled = is_compiled(model)
        self._is_tried = True
        """Whether it is being tried out, where every column is looked at."""

    def forget(self) -> None:
        """Count from here on: what was run until now was for trying."""
        self._is_tried = False
        self.counts.clear()
        self.seconds = 0.0

    def eagerly(self) -> AbstractContextManager[Any]:
        """For as long as the block lasts, nothing is compiled, and nothing that was compiled is used."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    def new_cache(self) -> Any:
        """An empty cache that keeps every column."""
        return self._new_cache()

    def run(
        self,
        rows: Sequence[Row],
        table: BatchRows,
        ids: list[list[int]],
        positions: list[list[int]],
        mask: Tensor | None,
        cache: Any,
    ) -> Tensor:
        """The logits of the last column, (rows, vocabulary)."""
        options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            options["position_ids"] = torch.tensor(positions, device=self.device)
        if self._may_keep_last and not self._is_watched():
            options["logits_to_keep"] = 1  # of a prompt of 8,000 tokens and a vocabulary of 128,000, 4 GB less
        start = time.perf_counter()
        if self.gatherer is not None:
            self.gatherer.expect(rows, table, len(ids[0]))
        # Prompts come in all lengths and numbers, and would be compiled again and again, which is worth it for the
        # single tokens that follow.
        mode = self.eagerly() if table.phase == "prefill" else nullcontext()
        with mode, torch.inference_mode(), serving(table):
            logits: Tensor = self.model(input_ids=torch.tensor(ids, device=self.device), **options).logits[:, -1]
        self.counts[f"{table.phase}_forwards"] += 1
        self.counts[f"{table.phase}_tokens"] += sum(map(len, table.tokens))
        self.seconds += time.perf_counter() - start
        return logits

    def _is_watched(self) -> bool:
        if self._is_tried:
            return True
        tables = (existing_hooks(module) for module in self._ends)
        return any(table is not None and any(True for _ in table.entries()) for table in tables)


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of it is; a wrapper's forward is a compiled function too."""
    modules = model.modules()
    return any(_torch.is_compiled(module) or _torch.is_compiled_function(module.forward) for module in modules)


def _cache_class() -> Any:
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise MissingPackageError(
            "Serving a model needs the transformers package: pip install 'hookline[serve]'."
        ) from error
    return DynamicCache
