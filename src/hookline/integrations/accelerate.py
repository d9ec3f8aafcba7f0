"""Hooks in a loop that uses Hugging Face Accelerate.

Users call `follow` after ``accelerator.prepare``; it calls `hookline.follow` with what Accelerate keeps. Needs the
package ``accelerate``, which ``pip install 'hookline[accelerate]'`` brings.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hookline.distributed.ranks import this_rank
from hookline.error_policy import warn_user
from hookline.errors import OptionError
from hookline.integrations.follow import Follow
from hookline.integrations.follow import follow as follow_loop
from hookline.integrations.host_run import HostLogSink, check_report_to, needed_package
from hookline.lifecycle import checkpoint_file
from hookline.messages import type_name
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sites.functions.wrapped import wrapped
from hookline.training.ranks import averaging_model

with needed_package("accelerate", __name__):  # so that its absence is told before a loop is followed
    import accelerate  # noqa: F401

if TYPE_CHECKING:
    from torch import nn


def follow(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    hooks: Iterable[Any] | str | None = None,
    *,
    scheduler: Any = None,
    sinks: Any = None,
    report_to: str | None = None,
    **options: Any,
) -> Follow:
    """Fire hooks in a loop that Accelerate has prepared; return what follows it.

    Recipe::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        run = hookline.integrations.accelerate.follow(accelerator, model, optimizer, ["norms"], loader=loader)
        for batch in loader:  # your loop, as it is
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        run.close()

    A step that Accelerate leaves out, because gradients are accumulated or have overflowed, is none. The state of the
    hooks is saved and loaded with ``accelerator.save_state`` and ``load_state``: call this before ``load_state``. Call
    ``save_state`` on every rank: each writes a file of its own, ``hookline_rank0.pt`` and so on.

    Args:
        accelerator: The ``Accelerator``.
        model: The model that it has prepared; hooks see the one inside, with plain names.
        optimizer: The optimizer that it has prepared.
        hooks: Hooks as objects, classes or names; trackers and watches as well.
        scheduler: Of the learning rate, prepared or not; interventions put it back.
        sinks: Where metrics go. If left out: as ``report_to="trackers"`` if the accelerator has trackers, or else lines
            of JSON in ``hookline/`` in its project folder.
        report_to: ``"trackers"`` hands metrics to ``accelerator.log`` as well, and so to the W&B or TensorBoard run
            that is open. ``"sinks"`` does not.
        options: As for `hookline.follow`: ``loader=``, ``loss_fn=``, ``run_file=``, ``on_error=``, …
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise OptionError(f"follow(accelerator, model, optimizer) takes an Accelerator; got {type_name(accelerator)}.")
    if report_to is not None:
        check_report_to(report_to, "trackers")
    given = sinks is not None or options.get("manager") is not None or options.get("run_file") is not None
    if not given and report_to is None:
        sinks, report_to = (None, "trackers") if accelerator.log_with else ([JSONLSink()], None)
    log = HostLogSink(lambda metrics, step: accelerator.log(metrics, step=step)) if report_to == "trackers" else None
    folder = Path(accelerator.project_dir or ".") / "hookline"
    usual: dict[str, Any] = {"run_context": {"run_dir": str(folder), "strategy": "accelerate"}}
    if accelerator.gradient_accumulation_steps > 1:
        usual["accumulate"] = accelerator.gradient_accumulation_steps
    run = follow_loop(
        averaging_model(model),
        optimizer,
        hooks,
        sinks=sinks,
        scheduler=getattr(scheduler, "scheduler", scheduler),
        scaler=getattr(accelerator, "scaler", None),
        report_to=log,
        **{**usual, **options},
    )
    _save_with(accelerator, run)
    if options.get("loader") is not None:

        def skip(original: Any, *args: Any, **kwargs: Any) -> Any:
            rest = original(*args, **kwargs)
            run.follow_loader(rest)
            return rest

        # The rest of a resumed epoch comes from a loader that Accelerate makes.
        run.when_closed(wrapped(accelerator, "skip_first_batches", skip))
    return run


def _save_with(accelerator: Any, run: Follow) -> None:
    """Save and load the state of a followed run with ``save_state`` and ``load_state``, each rank in a file of its own.

    Nothing is gathered, since many loops call ``save_state`` on rank 0 alone: then all ranks go on from its file.
    """
    number = _followed[accelerator] = _followed.get(accelerator, 0) + 1
    name = "hookline" if number == 1 else f"hookline{number}"

    def write(models: Any, weights: Any, folder: str) -> None:
        checkpoint_file.write(Path(folder, f"{name}_rank{this_rank()}.pt"), run.state_dict())

    def read(models: Any, folder: str) -> None:
        first, own = (Path(folder, f"{name}_rank{rank}.pt") for rank in (0, this_rank()))
        if not first.is_file():
            warn_user(f"There is no {first.name} in {folder}, so hooks begin anew: it was saved without them.")
            return
        state = checkpoint_file.read(first)
        kept = checkpoint_file.read(own) if own.is_file() else state
        # A file of another save is left alone: rank 0 has written since, and this rank has not.
        run.load_state_dict(kept if kept["run"]["step"] == state["run"]["step"] else state)

    run.when_closed(accelerator.register_save_state_pre_hook(write).remove)
    run.when_closed(accelerator.register_load_state_pre_hook(read).remove)


_followed: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many runs of an accelerator were followed: a number in the names of their files."""
