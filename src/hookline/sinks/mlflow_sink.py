"""Write metrics as runs of MLflow.

The helper process hands records to `MLflowSink`, which logs batches by the client of the ``mlflow`` package.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from pathlib import Path
from typing import Any, ClassVar, Final

from hookline.files import replace_file
from hookline.records.sink import Record, RunSink
from hookline.records.values import as_numbers, json_text, values_in

_FORBIDDEN: Final = re.compile(r"[^/\w.\- ]")
_LONGEST_KEY: Final = 250
_LONGEST_TEXT: Final = 5000
_METRICS: Final = 900
"""MLflow takes 1,000 things at a time, of which 100 may be tags."""
_PARAMS: Final = 100


class MLflowSink(RunSink):
    """An MLflow run per strategy: metrics at the global step, the configuration as parameters.

    Recipe::

        sink = hookline.sinks.MLflowSink("sqlite:///mlflow.db", experiment="mod_arithmetic")
        sink.set_run_context(strategy="random", config={"lr": 1e-3})
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        sink.close()  # then: mlflow ui --backend-store-uri sqlite:///mlflow.db

    Step metrics are a value per step; of any other list of numbers there are ``{name}_mean``, ``_min`` and ``_max``.
    Dictionaries are ``name/key``, strings are tags of the run, None is left out. MLflow's names have letters, digits
    and ``_-./`` and spaces: other signs become ``_``, and names of more than 250 signs end with a checksum. A resumed
    run continues the same MLflow run, whose id is kept in the run's folder.

    Args:
        tracking_uri: The store, or its file, which ends with ``.db``; None for ``MLFLOW_TRACKING_URI``, else
            ``{run_dir}/mlflow.db``.
        experiment: The MLflow experiment; None for the name of the run's experiment.
    """

    slow: ClassVar[bool] = True
    package: ClassVar[str | None] = "mlflow"
    extra: ClassVar[str | None] = "mlflow"

    def __init__(self, tracking_uri: str | Path | None = None, experiment: str | None = None) -> None:
        super().__init__()
        self._tracking_uri = None if tracking_uri is None else _as_uri(str(tracking_uri))
        self._experiment = experiment
        self._client: Any = None
        self.run_id: str | None = None
        """The MLflow run that is being written."""

    def options(self) -> dict[str, Any]:
        """Return the store and the experiment."""
        return {"tracking_uri": self._tracking_uri, "experiment": self._experiment}

    def write(self, record: Record) -> None:
        """Log the metrics and texts of a record."""
        uri = self._uri()
        if uri is None:
            self._drop()
            return
        exceptions = self._import("mlflow.exceptions")
        try:
            if self.run_id is None:
                self._open(uri)
            self._log(record)
        except exceptions.MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):  # it refuses what is in the record
                raise
            raise ConnectionError(str(error)) from error  # after which the record comes again

    def _log(self, record: Record) -> None:
        from mlflow.entities import Metric, RunTag

        # The time of the record: one that comes twice is then the same row of the store.
        stamp = int(record.time * 1000)
        metrics, tags = [], {}
        for name, value, step in values_in(record, reserved=("epoch",)):
            found = as_numbers(name, value)
            metrics += [Metric(_key(part), one, stamp, step) for part, one in found.items()]
            if not found and value is not None:
                tags[name] = RunTag(_key(name), _text(value))  # of several steps the last
        if record.epoch is not None:
            metrics.append(Metric("epoch", float(record.epoch), stamp, record.step or 0))
        self._send("metrics", metrics, _METRICS)
        self._send("tags", list(tags.values()), _PARAMS)

    def _send(self, what: str, items: list[Any], most: int) -> None:
        for start in range(0, len(items), most):
            self._client.log_batch(self.run_id, **{what: items[start : start + most]})

    # -- runs -------------------------------------------------------------------------------------------------

    def _open(self, uri: str) -> None:
        # It would print a line for each table of a new store.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        self._client = self._import("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self.run_id = self._known_run(uri)
        if self.run_id is None:
            self._begin(uri)

    def _uri(self) -> str | None:
        """Return the store; None if it is not known yet."""
        given, folder = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), self._context.folder
        if given or folder is None:
            return given
        folder.mkdir(parents=True, exist_ok=True)
        return _as_uri(str(folder / "mlflow.db"))

    def _begin(self, uri: str) -> None:
        from mlflow.entities import Param

        known, strategy = self._context.known, self._context.strategy
        tags = {"strategy": str(strategy), "group": str(known.get("run_group", ""))}
        run = self._client.create_run(self._experiment_id(uri), run_name=strategy or "run", tags=tags)
        self.run_id = str(run.info.run_id)
        config = values_in(Record(known.get("config") or {}, 0, ""))
        self._send("params", [Param(_key(name), _text(value)) for name, value, _ in config], _PARAMS)
        if (file := self._run_file()) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps({"tracking_uri": uri, "run_id": self.run_id}))

    def _experiment_id(self, uri: str) -> str:
        name = self._experiment or str(self._context.known.get("experiment_name") or "hookline")
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        # Beside the database, not in the current folder; made when something is put there.
        place = None
        if uri.startswith("sqlite:///"):
            place = (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=place))

    def _run_file(self) -> Path | None:
        folder = self._context.folder
        return None if folder is None or self._is_replay else folder / "mlflow_run.json"

    def _known_run(self, uri: str) -> str | None:
        """Return the id of the run to continue; None if it is in another store, or gone."""
        from mlflow.exceptions import MlflowException

        file = self._run_file()
        kept = json.loads(file.read_bytes()) if file is not None and file.is_file() else {}
        if kept.get("tracking_uri") != uri:
            return None
        try:
            self._client.update_run(kept["run_id"], status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return str(kept["run_id"])

    def end_run(self) -> None:
        run_id, self.run_id = self.run_id, None
        if run_id is not None:
            self._client.set_terminated(run_id)


def _as_uri(place: str) -> str:
    """Return a database that is given as a file as MLflow names it."""
    if "://" in place or not place.endswith(".db"):
        return place
    return f"sqlite:///{Path(place).absolute().as_posix()}"


def _text(value: Any) -> str:
    text = json_text(value) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …"


def _key(name: str) -> str:
    """Return ``name`` with ``_`` for signs, and for parts of a path, that MLflow refuses."""
    parts = _FORBIDDEN.sub("_", name).split("/")
    key = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 9]}_{zlib.crc32(name.encode()):08x}"
