"""What holds for every logger: a process is killed, the next one goes on, and nothing is missing or there twice."""

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from logger_readers import SCALARS, assert_same, by_key, mlflow_run, tensorboard_events, wandb_id, wandb_records
from PIL import Image

from gossip import LaunchError, launch
from gossip.lab.loggers.logger import Beginning, Ending
from gossip.lab.loggers.logger_choice import LOGGERS

# All start in one process, which imports wandb and MLflow.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("loggers")]

NUM_STEPS, STOPPED_AT, FLUSHED, RESUMED_AT = 12, 3, 7, 5
SUMMARY = {"status": "completed", "reason": "", "loss": 0.25, "diverged": None, "wait_by_peer_s": {"1": 0.5}}


def values_of(step: int) -> dict[str, Any]:
    """As the ranks write them: some not measured, some by peer, some at some steps only, many at one."""
    values: dict[str, Any] = {
        "epoch": step // 4,
        "loss": None if step == 6 else 1 / (step + 1),
        "gradient_norm": None,
        "wait_by_peer_s": {"1": 0.5 * step, "10": 3},
    }
    if step % 3 == 0:
        values["averaged_test_loss"] = float(step)
    if step == 8:
        values["bytes_by_peer"] = {str(peer): peer for peer in range(1300)}  # more than fit into MLflow's batch
    return values


def beginning(folder: Path, step: int) -> Beginning:
    return Beginning(
        folder,
        world_size=2,
        step=step,
        config={"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 3},
        name="a run",
        group="a group",
        tags=("first", "second"),
    )


def first_attempts(folders: dict[str, Path]) -> None:
    """One that is stopped and ended, and one that goes on and is killed."""
    for name, folder in folders.items():
        stopped = LOGGERS.get(name)()
        assert stopped.begin(beginning(folder, 0)) == 0
        for step in range(STOPPED_AT):
            stopped.log(step, values_of(step))
        stopped.end(Ending("stopped", {"status": "failed"}))
        logger = LOGGERS.get(name)()
        assert logger.begin(beginning(folder, STOPPED_AT)) == STOPPED_AT
        for step in range(STOPPED_AT, FLUSHED + 2):
            logger.log(step, values_of(step))
            if step == FLUSHED - 1:
                logger.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def second_attempts(folders: dict[str, Path], figure: Path, model: Path) -> list[int]:
    """W&B is not to tell of them on the terminal."""
    firsts = []
    with contextlib.redirect_stderr(io.StringIO()) as told:
        for name, folder in folders.items():
            os.environ["WANDB_DATA_DIR"] = str(folder)  # where it stages artifacts
            logger = LOGGERS.get(name)()
            firsts.append(first := logger.begin(beginning(folder, RESUMED_AT)))
            for step in range(first, NUM_STEPS - 2):
                logger.log(step, values_of(step))
            logger.flush()
            for step in range(logger.begin(beginning(folder, NUM_STEPS - 2)), NUM_STEPS):  # as after a failure
                logger.log(step, values_of(step))
            logger.end(Ending("completed", SUMMARY, (figure,), model))
    assert "wandb: " not in told.getvalue()
    return firsts


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """For every logger the run's folder, and where the second attempt began."""
    parent = tmp_path_factory.mktemp("runs")
    figure, model = parent / "training.png", parent / "model.safetensors"
    Image.new("RGB", (3, 2), (255, 0, 0)).save(figure)
    model.write_bytes(b"weights")
    folders = {name: parent / name for name in LOGGERS.available()}
    for folder in folders.values():
        folder.mkdir()
    with pytest.raises(LaunchError, match="SIGKILL"):
        launch(first_attempts, folders, world_size=1)
    (firsts,) = launch(second_attempts, folders, figure, model, world_size=1)
    return {name: (folder, first) for (name, folder), first in zip(folders.items(), firsts, strict=True)}


@pytest.mark.parametrize("name", LOGGERS.available())
def test_logger_has_every_step_of_every_key_once_after_a_kill(name: str, attempts: dict[str, tuple[Path, int]]) -> None:
    folder, first = attempts[name]
    # The files of W&B's killed attempt are removed, and those of the one before it are not.
    assert first == STOPPED_AT if name == "wandb" else STOPPED_AT < first <= FLUSHED + 2
    assert_same(SCALARS[name](folder), by_key({step: values_of(step) for step in range(NUM_STEPS)}))


@pytest.mark.parametrize("name", LOGGERS.available())
def test_logger_keeps_what_is_not_a_number_of_a_step(name: str, attempts: dict[str, tuple[Path, int]]) -> None:
    CHECKS[name](attempts[name][0])


def check_tensorboard(folder: Path) -> None:
    events = tensorboard_events(folder)
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    run = json.loads(texts["run/text_summary"])
    assert (run["name"], run["group"], run["tags"], run["seed"]) == ("a run", "a group", ["first", "second"], 3)
    assert json.loads(texts["summary/text_summary"]) == SUMMARY
    (image,) = events.Images("figures/training")
    assert (image.width, image.height) == (3, 2)


def check_wandb(folder: Path) -> None:
    found = wandb_records(folder, wandb_id(folder))
    for run in (record.run for record in found if record.WhichOneof("record_type") == "run"):
        assert (run.display_name, run.run_group, list(run.tags)) == ("a run", "a group", ["first", "second"])
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["optimizer"] == {"lr": 0.1, "betas": [0.9, 0.99]}
    summary: dict[str, Any] = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    assert summary["loss"] == 0.25
    assert summary["status"] == "completed"
    image = summary["figures/training"]
    assert list(folder.glob(f"wandb/offline-run-*/files/{image['path']}"))
    (artifact,) = (record.artifact for record in found if record.WhichOneof("record_type") == "artifact")
    assert (artifact.type, artifact.manifest.contents[0].path) == ("model", "model.safetensors")
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"][-1] == 0


def check_mlflow(folder: Path) -> None:
    client, run = mlflow_run(folder)
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.params == {"optimizer/lr": "0.1", "optimizer/betas": "[0.9, 0.99]", "seed": "3"}
    tags = {"group": "a group", "first": "true", "second": "true", "records": "mean"}
    assert tags.items() <= run.data.tags.items()
    assert run.data.metrics["summary/loss"] == 0.25
    run_id = run.info.run_id
    assert client.list_artifacts(run_id, "figures")[0].path == "figures/training.png"
    assert client.list_artifacts(run_id, "model")[0].path == "model/model.safetensors"
    assert len(client.search_runs([run.info.experiment_id])) == 1


CHECKS = {"tensorboard": check_tensorboard, "wandb": check_wandb, "mlflow": check_mlflow}
"""One row per logger."""
