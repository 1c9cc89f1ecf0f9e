"""MLflow (https://mlflow.org): one MLflow run for each run directory.

Set it up with its own variables: ``MLFLOW_TRACKING_URI`` (by default MLflow's own place, ``mlflow.db`` in the folder
from which the run is started: `mlflow ui` there shows it), ``MLFLOW_EXPERIMENT_NAME`` (``rlinf`` by default),
``MLFLOW_RUN_NAME``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlinf_core.errors import RLinfError
from rlinf_core.loggers import PROJECT, axis, read_config, run_name

REQUIRES = {"mlflow": "mlflow", "sqlalchemy": "mlflow", "alembic": "mlflow"}
ID_FILE = "mlflow-run"
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000
"""Limits of one call of the service, in metrics, parameters and characters of a value."""

PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long a server that does not answer is waited for, unless the user says otherwise: a quarter of a minute where
nothing listens. MLflow's own seven retries say nothing for minutes, and a step would wait as long."""


class MlflowLogger:
    """Metrics as ``phase/name``, the run's configuration as parameters.

    Names may not have every character there: ``pass@4`` becomes ``pass_at_4``, other ones an underscore. The id of
    the run is kept in the run directory, so that a run that goes on in it is the same one there; the points after the
    checkpoint that it goes on from are then there twice.

    Raises:
        RLinfError: the service refuses or does not answer; the message has its address.
    """

    def __init__(self, run_dir: Path) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._metric, self._param, self._refusal = Metric, Param, MlflowException
        self._run_dir = run_dir
        self._configured = False
        self._uri: str = mlflow.get_tracking_uri()
        path = run_dir / ID_FILE
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=self._uri)
            if path.is_file():
                self._id = json.loads(path.read_text(encoding="utf-8"))["run_id"]
                self._client.update_run(self._id, status="RUNNING")
                self._configured = True
            else:
                name = os.environ.get("MLFLOW_RUN_NAME") or run_name(run_dir)
                self._id = self._client.create_run(self._experiment(), run_name=name).info.run_id
                path.write_text(json.dumps({"tracking_uri": self._uri, "run_id": self._id}) + "\n", encoding="utf-8")
        except MlflowException as error:
            raise self._refused("begin a run", error) from error

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _refused(self, doing: str, error: BaseException) -> RLinfError:
        return RLinfError(f"loggers: mlflow at {self._uri} (MLFLOW_TRACKING_URI) cannot {doing}: {error}")

    def log(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        now, at = int(time.time() * 1000), axis(step, metrics)
        values = [self._metric(metric_name(f"{phase}/{name}"), value, now, at) for name, value in metrics.items()]
        try:
            if not self._configured:
                self._configured = True
                config = read_config(self._run_dir).items()
                params = [self._param(metric_name(key), str(value)[:LONGEST_PARAM]) for key, value in config]
                for part in _parts(params, MOST_PARAMS):
                    self._client.log_batch(self._id, params=part)
            for part in _parts(values, MOST_METRICS):
                self._client.log_batch(self._id, metrics=part)
        except self._refusal as error:
            raise self._refused("write metrics", error) from error

    def close(self) -> None:
        """End the run there, as failed when the run ends with an error."""
        try:
            self._client.set_terminated(self._id, "FINISHED" if sys.exc_info()[0] is None else "FAILED")
        except self._refusal as error:
            raise self._refused("end the run", error) from error


def metric_name(name: str) -> str:
    """``name`` with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def _parts(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])
