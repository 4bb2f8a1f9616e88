"""The MLflow logger."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from gossip.lab.experiments.records import leaves, without_non_finite
from gossip.lab.loggers.logger import MEAN, Beginning, Ending, flattened

NAME = "mlflow"
_MARK = "loss"  # present in every record and logged last, so it marks a record that is complete on the server
_MAX_CHARACTERS = 6000  # MLflow's limit for the value of a parameter
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowLogger:
    """Logs to an MLflow run; a resumed run continues the same MLflow run, whose id is kept in the run folder.

    A ``tracking_uri`` of None selects the SQLite file ``mlflow.db`` in the run folder. The MLflow ``experiment`` is
    created if it does not exist.
    """

    libraries: tuple[str, ...] = (NAME, "sqlalchemy", "alembic")

    def __init__(self, tracking_uri: str | None = None, experiment: str = "gossip-training") -> None:
        self._uri, self._experiment = tracking_uri, experiment

    def begin(self, beginning: Beginning) -> int:
        """Reopen the MLflow run that was recorded for this tracking URI, or create one."""
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs the creation of its tables
        uri = self._uri or f"sqlite:///{beginning.folder.resolve()}/{NAME}.db"
        self._client = MlflowClient(tracking_uri=uri)
        self._pending: list[Any] = []
        state = beginning.read_state(NAME)
        if state.get("tracking_uri") == uri:
            self._run_id = str(state["run_id"])
            self._client.update_run(self._run_id, status="RUNNING")
            history = self._client.get_metric_history(self._run_id, _MARK)
            return max((metric.step + 1 for metric in history), default=0)
        self._run_id = self._new_run(beginning)
        beginning.write_state(NAME, {"tracking_uri": uri, "run_id": self._run_id})
        return 0

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the numbers of the record until they are sent."""
        flat = flattened(values)
        self._add({key: flat[key] for key in sorted(flat, key=lambda key: key == _MARK)}, step)

    def flush(self) -> None:
        """Send the pending numbers, in their order and in batches of which MLflow's client sees to the size."""
        self._client.log_batch(self._run_id, metrics=self._pending)
        self._pending = []

    def end(self, ending: Ending) -> None:
        """Log the numbers of the summary as metrics and the files as artifacts, and terminate the run."""
        if ending.status == "completed":
            summary = leaves(ending.summary, "summary", separator="/")
            self._add({key: float(value) for key, value in summary if isinstance(value, int | float)}, 0)
        self.flush()
        self._client.log_dict(self._run_id, without_non_finite(ending.summary), "summary.json")
        for path in ending.figures:
            self._client.log_artifact(self._run_id, str(path), "figures")
        if ending.model is not None:
            self._client.log_artifact(self._run_id, str(ending.model), "model")
        self._client.set_terminated(self._run_id, _STATUS[ending.status])

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._pending += [Metric(key, number, now, step) for key, number in numbers.items()]

    def _new_run(self, beginning: Beginning) -> str:
        from mlflow.entities import Param

        tags = dict.fromkeys(beginning.tags, "true") | {"records": MEAN}
        if beginning.group:
            tags["group"] = beginning.group
        run = self._client.create_run(self._experiment_id(beginning), run_name=beginning.name, tags=tags)
        params = [Param(key, str(value)[:_MAX_CHARACTERS]) for key, value in leaves(beginning.config, separator="/")]
        self._client.log_batch(run.info.run_id, params=params)
        return str(run.info.run_id)

    def _experiment_id(self, beginning: Beginning) -> str:
        from mlflow.exceptions import MlflowException

        # With the local database, artifacts are stored beside it; otherwise the server determines their location.
        location = None if self._uri else (beginning.folder.resolve() / "mlflow_artifacts").as_uri()
        with contextlib.suppress(MlflowException):  # the experiment exists already
            return str(self._client.create_experiment(self._experiment, artifact_location=location))
        return str(self._client.get_experiment_by_name(self._experiment).experiment_id)
