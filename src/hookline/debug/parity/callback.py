"""`ParityCallback`: compare trainer and engine every few steps of TRL's GRPO trainer, on the samples at hand."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from hookline.debug.parity.parity import parity
from hookline.errors import OptionError
from hookline.phases import in_phase

__all__ = ["ParityCallback"]

logger = logging.getLogger("hookline.parity")


class ParityCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
    """Log ``parity/gap``, ``parity/times`` and ``parity/outside`` every so many steps of a trainer that samples.

    Recipe::

        callback = ParityCallback(engine="http://localhost:8000", every=50)
        trainer = GRPOTrainer(model, rewards, args=args, train_dataset=data, callbacks=[callback])
        callback.follow(trainer)
        trainer.train()

    It reads the completions and log-probs that the trainer keeps for its next losses (``_buffered_inputs``), before
    the first optimizer step on them: after it the weights are others than those that the engine had. A trainer has
    log-probs of an engine with ``use_vllm`` or a ``rollout_func``. The sentence goes to the log of ``hookline.parity``.

    Args:
        engine: Any engine of `parity`, to find the layer as well; None compares the kept log-probs alone.
        every: At least so many steps lie between two comparisons; the first is at the first step.
        most: At most so many sequences are compared.
        options: Of `parity`.
    """

    def __init__(self, engine: Any = None, every: int = 50, most: int = 16, **options: Any) -> None:
        self._engine, self._every, self._most, self._options = engine, every, most, options
        self._trainer: Any = None
        self._due = 0
        self._seen: Any = None

    def follow(self, trainer: Any) -> None:
        """Say whose samples are compared."""
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Compare new samples, if it is time to; an error is logged, and training goes on."""
        kept = getattr(self._trainer, "_buffered_inputs", None) or []
        is_new, self._seen = kept is not self._seen, kept
        if not state.is_world_process_zero or not is_new or state.global_step < self._due:
            return
        self._due, step = state.global_step + self._every, state.global_step + 1
        try:
            heat = getattr(self._trainer, "temperature", 1.0)
            options = {"tokenizer": others.get("processing_class"), "temperature": heat, **self._options}
            with in_phase("intervention"):  # its forwards are none of the step that is under way
                found = parity(model, self._engine, self._sequences(kept), **options)
        except Exception as error:
            logger.warning("step %d: trainer and engine were not compared: %s", step, error)
            return
        logger.warning("step %d: %s", step, found.sentence)
        gap = found.gap
        self._trainer.log({"parity/gap": gap.rms, "parity/times": found.times, "parity/outside": gap.outside})

    def _sequences(self, kept: list[Any]) -> list[dict[str, Any]]:
        """Return what was sampled last, with the engine's log-probs."""
        if self._trainer is None:
            raise OptionError("Call follow(trainer) once the trainer is made.")
        found = []
        for batch in kept:
            if batch.get("sampling_per_token_logps") is None:
                raise OptionError("The trainer keeps no log-probs of an engine; it does with use_vllm or rollout_func.")
            for row, logprobs in enumerate(batch["sampling_per_token_logps"]):
                asked, given = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
                prompt, completion = batch["prompt_ids"][row][asked], batch["completion_ids"][row][given]
                found.append({"prompt": prompt.tolist(), "completion": completion.tolist()})
                found[-1]["logprobs"] = logprobs[given].tolist()
        return found[: self._most]
