"""The Weights & Biases logger."""

from __future__ import annotations

import contextlib
import netrc
import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from gossip.lab.experiments.records import without_non_finite
from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.lab.loggers import wandb_files
from gossip.lab.loggers.logger import Beginning, Ending, flattened

NAME = "wandb"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbLogger:
    """Logs to a W&B run; a resumed run continues the same W&B run, whose id is kept in the run folder.

    There is no interactive login: offline mode needs none, and online mode without a login is refused at construction.

    Parameters
    ----------
    mode : {"offline", "online"}
        "offline" writes to ``wandb/`` in the run folder, for a later ``wandb sync``.
    project : str
        The W&B project.
    entity : str or None
        The team or user; None selects the default of the login.

    Raises
    ------
    ConfigurationError
        The mode is "online" and there is no login.
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
        """Open the W&B run with the recorded id, or with a new one."""
        import wandb

        if self._run is not None:
            with contextlib.suppress(Exception):
                self._run.finish(exit_code=1)
        run_id = beginning.read_state(NAME).get("id") or secrets.token_hex(4)
        beginning.write_state(NAME, {"id": run_id})
        on_disk = wandb_files.next_step(beginning.folder, run_id)
        is_online = self._mode == "online"
        self._run = wandb.init(
            id=run_id,
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
                silent=True,
                console="off",
                init_timeout=beginning.wait_s,
                finish_timeout=beginning.wait_s,
            ),
        )
        return int(self._run.step) if is_online else on_disk

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the record as the row of ``step`` in the history."""
        self._run.log(flattened(values), step=step, commit=True)

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
        self._run.finish(exit_code=0 if ending.status == "completed" else 1)


def _is_logged_in() -> bool:
    """Whether wandb would find an API key for the server, in the environment or in a netrc file."""
    import wandb

    if any(os.environ.get(name) for name in _KEYS):
        return True
    host = urlsplit(wandb.Settings().base_url).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
    return False
