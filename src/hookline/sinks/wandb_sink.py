"""Write metrics as runs of Weights & Biases.

The helper process hands records to `WandbSink`, which logs rows by the ``wandb`` package.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from hookline.error_policy import error_text, warn_user
from hookline.errors import OptionError
from hookline.records.sink import Record, RunSink, file_name
from hookline.records.values import MetricValue, json_text, mean, number, numbers, values_in

_RESERVED: Final = frozenset({"step", "epoch", "_step", "_runtime", "_timestamp", "_wandb"})
_FORBIDDEN: Final = frozenset("/\\#?%:")
_BINS: Final = 64


class WandbSink(RunSink):
    """A W&B run per strategy, in one group, plotted over the global step with the epoch beside.

    Recipe::

        sink = hookline.sinks.WandbSink("my-project", mode="offline")
        sink.set_run_context(strategy="random", run_dir="runs/mod_arithmetic/random")
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        sink.close()

    Step metrics are a value per step; any other list of numbers is a histogram of its finite values and a number
    ``{name}_mean``. Dictionaries are ``name/key``; None is left out; a metric called ``step``, ``epoch`` or ``_step``
    becomes ``metric/step``. A resumed run continues the same W&B run, whose id is kept in the run's folder. W&B never
    asks for a key: without one, and with no mode named here or in ``WANDB_MODE``, the run is written offline, to be
    sent later by ``wandb sync``.

    Args:
        project: The W&B project.
        group: The group of the runs of all strategies; None for the run's own, else the experiment and the time.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; None for ``WANDB_MODE``, else online if there is a key.
        config: Added to every run, beside the experiment's own configuration.
        dir: Where W&B keeps its files; None for the run's folder.
    """

    slow: ClassVar[bool] = True
    package: ClassVar[str | None] = "wandb"
    extra: ClassVar[str | None] = "wandb"

    def __init__(
        self,
        project: str,
        *,
        group: str | None = None,
        mode: str | None = None,
        config: Mapping[str, Any] | None = None,
        dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        if not project or len(project) > 128 or _FORBIDDEN & set(project):
            raise OptionError(f"W&B takes names of 1 to 128 signs without / \\ # ? % : as project=; got {project!r}.")
        place = None if dir is None else str(Path(dir).absolute())
        self._options: dict[str, Any] = {
            "project": project, "group": group, "mode": mode, "config": dict(config or {}), "dir": place,
        }  # fmt: skip
        self._started = time.strftime("%Y%m%d_%H%M%S")
        self._run: Any = None

    def options(self) -> dict[str, Any]:
        """Return the arguments."""
        return self._options

    def write(self, record: Record) -> None:
        """Log a row for each step of a record."""
        run = self._run or self._open()
        rows: dict[int, dict[str, Any]] = {}
        for one in values_in(record, _RESERVED):
            rows.setdefault(one.step, {}).update(self._values(one))
        epoch = {} if record.epoch is None else {"epoch": record.epoch}
        for step in sorted(rows):
            run.log({**rows[step], **epoch, "step": step})

    def _values(self, one: MetricValue) -> dict[str, Any]:
        """Return ``one`` as W&B takes it: a value, a histogram and its mean, or nothing for None."""
        name, value, _ = one
        if value is None:
            return {}
        if isinstance(value, str) or number(value) is not None:
            return {name: value}
        several = numbers(value)
        if several is None:
            return {name: json_text(value)}
        import numpy

        found: dict[str, Any] = {f"{name}_mean": mean(several)}
        if finite := list(filter(math.isfinite, several)):
            found[name] = self._import("wandb").Histogram(np_histogram=numpy.histogram(finite, bins=_BINS))
        return found

    # -- runs -------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        wandb = self._import("wandb")
        given, known, folder = self._options, self._context.known, self._context.folder
        place = given["dir"] or (None if folder is None else str(folder))
        if place is not None:
            Path(place).mkdir(parents=True, exist_ok=True)
        id_file = None  # of a run of which nothing is kept
        if folder is not None and not self._is_replay:
            id_file = folder / "wandb" / f"run_id_{file_name(given['project'])}.txt"
        run_id = id_file.read_text().strip() or None if id_file is not None and id_file.is_file() else None
        group = f"{known.get('experiment_name') or given['project']}_{self._started}"
        try:
            self._run = wandb.init(
                project=given["project"],
                name=self._context.strategy,
                group=given["group"] or known.get("run_group") or group,
                config={**given["config"], **(known.get("config") or {})},
                dir=place,
                mode=given["mode"] or self._possible_mode(wandb),
                id=run_id,
                resume=None if run_id is None else "allow",
                reinit="create_new",  # leaves a run of the user's own in this process alone
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # not the fault of this record: it is tried again
            raise ConnectionError(f"no W&B run could be begun ({error_text(error)})") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if id_file is not None:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(self._run.id)
        return self._run

    def _possible_mode(self, wandb: Any) -> str | None:
        """Return "offline" where W&B would ask for a key; None leaves the choice to W&B."""
        if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False):
            return None
        warn_user(
            "WandbSink found no key for W&B, so the run is written offline. Send it later with 'wandb sync', or run "
            "'wandb login' first."
        )
        return "offline"

    def end_run(self) -> None:
        """Finish the run; W&B's own process sends what it holds before this returns."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
