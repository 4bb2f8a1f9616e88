"""What each logger has of a run's folder, by the reader that its own library brings."""

import contextlib
import json
import math
import sqlite3
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossip.lab.loggers.logger import flattened

Scalars = dict[str, list[tuple[int, float]]]
"""By key the steps and values, in the order in which they were logged."""


def by_key(records: Mapping[int, Mapping[str, Any]]) -> Scalars:
    """The scalars of records by step."""
    scalars: Scalars = {}
    for step, values in records.items():
        for key, value in flattened(values).items():
            scalars.setdefault(key, []).append((step, value))
    return scalars


def tensorboard_scalars(folder: Path) -> Scalars:
    events = tensorboard_events(folder)
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def tensorboard_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard" / "mean"), size_guidance={"scalars": 0}).Reload()


def wandb_records(folder: Path, run_id: str) -> list[Any]:
    """Of all offline files of the run, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        try:
            while (message := store.scan_data()) is not None:
                found.append(Record.FromString(message))
        except AssertionError:  # where its writer was killed
            pass
        finally:
            store.close()
    return found


def wandb_id(folder: Path) -> str:
    return str(json.loads((folder / "loggers" / "wandb_mean.json").read_text())["id"])


def wandb_scalars(folder: Path) -> Scalars:
    scalars: Scalars = {}
    for record in wandb_records(folder, wandb_id(folder)):
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            step = int(values["_step"])
            for key, value in values.items():
                if not key.startswith("_"):
                    scalars.setdefault(key, []).append((step, float(json.loads(value))))
    return scalars


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    """A client, and the run."""
    from mlflow import MlflowClient

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy")  # MLflow's use of SQLAlchemy 2.1
        client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    state = json.loads((folder / "loggers" / "mlflow_mean.json").read_text())
    return client, client.get_run(state["run_id"])


def mlflow_scalars(folder: Path) -> Scalars:
    """By one query: a client takes one for each key."""
    scalars: Scalars = {}
    query = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? AND key NOT LIKE 'summary/%' ORDER BY step"
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        for key, step, value, is_nan in database.execute(query, (mlflow_run(folder)[1].info.run_id,)):
            scalars.setdefault(key, []).append((step, math.nan if is_nan else value))
    return scalars


SCALARS: dict[str, Callable[[Path], Scalars]] = {
    "tensorboard": tensorboard_scalars,
    "wandb": wandb_scalars,
    "mlflow": mlflow_scalars,
}
"""One row per logger."""


def assert_same(found: Scalars, expected: Scalars) -> None:
    """Every key at exactly its steps, with its values in single precision."""
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        assert [step for step, _ in found[key]] == [step for step, _ in wanted], key
        for (step, value), (_, other) in zip(found[key], wanted, strict=True):
            same = math.isnan(value) if math.isnan(other) else math.isclose(value, other, rel_tol=1e-6)
            assert same, (key, step, value, other)
