"""The Weights & Biases logger."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gossip.lab.experiments.records import without_non_finite
from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.lab.loggers.logger import Beginning, Ending, flattened

NAME = "wandb"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbLogger:
    """Logs to a W&B run; a resumed run continues the same W&B run, whose id is kept in the run folder.

    There is no interactive login: ``mode`` "offline", which writes to ``wandb/`` in the run folder for a later
    ``wandb sync``, needs none, and "online" without a login is refused at construction. ``entity`` is the team or user;
    None selects the default of the login.
    """

    libraries: tuple[str, ...] = (NAME,)

    def __init__(
        self,
        mode: Literal["offline", "online"] = "offline",
        project: str = "gossip-training",
        entity: str | None = None,
    ) -> None:
        self._mode, self._project, self._entity = mode, project, entity
        self._run: Any = None
        if mode == "online" and not _is_logged_in():
            raise ConfigurationError(
                f"logger.wandb.mode=online needs a login, and there is none: set {_KEYS[0]}, or run wandb login, or "
                "set logger.wandb.mode=offline"
            )

    def begin(self, beginning: Beginning) -> int:
        """Open the W&B run with the recorded id, or with a new one.

        Offline, only the files of an attempt that was ended are known to be whole. Those of one that was killed or
        failed are removed, and its steps are logged again.
        """
        import wandb

        if self._run is not None:
            with contextlib.suppress(Exception):
                self._run.finish(exit_code=1)
        self._beginning = beginning
        self._state = {"id": secrets.token_hex(4), "next_step": 0, "whole": [], **beginning.read_state(NAME)}
        beginning.write_state(NAME, self._state)
        for folder in beginning.folder.glob(f"wandb/offline-run-*-{self._state['id']}*"):
            if folder.name not in self._state["whole"]:
                shutil.rmtree(folder, ignore_errors=True)
        is_online = self._mode == "online"
        self._run = wandb.init(
            id=self._state["id"],
            resume="allow" if is_online else None,
            dir=str(beginning.folder),
            mode=self._mode,
            project=self._project,
            entity=self._entity,
            name=beginning.name,
            group=beginning.group or None,
            tags=beginning.tags,
            config=without_non_finite(beginning.config),
            allow_val_change=True,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=beginning.wait_s, finish_timeout=beginning.wait_s
            ),
        )
        self._next_step = int(self._run.step if is_online else self._state["next_step"])
        return self._next_step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the record as the row of ``step`` in the history."""
        self._run.log(flattened(values), step=step, commit=True)
        self._next_step = step + 1

    def flush(self) -> None:
        """Do nothing: the wandb process has every row already, and keeps those that the server has not accepted."""

    def end(self, ending: Ending) -> None:
        """Add summary and figures to the W&B run's summary and the model as an artifact, and finish the run."""
        import wandb

        self._run.summary.update(without_non_finite(ending.summary))
        for path in ending.figures:
            self._run.summary[f"figures/{path.stem}"] = wandb.Image(str(path))
        if ending.model is not None:
            artifact = wandb.Artifact(f"model-{self._run.id}", type="model")
            artifact.add_file(str(ending.model))
            self._run.log_artifact(artifact)
        whole = [*self._state["whole"], Path(self._run.sync_dir).name]
        self._run.finish(exit_code=0 if ending.status == "completed" else 1)
        self._beginning.write_state(NAME, {**self._state, "next_step": self._next_step, "whole": whole})


def _is_logged_in() -> bool:
    """Whether wandb would find an API key for the server, in the environment or in a netrc file."""
    import wandb
    from requests.utils import get_netrc_auth

    return any(map(os.environ.get, _KEYS)) or get_netrc_auth(wandb.Settings().base_url) is not None
