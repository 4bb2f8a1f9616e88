"""The loggers that a configuration selects, and the settings common to all of them."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat

from gossip.lab.experiments.validated_models import ConfigurationError, Model, blaming, check_options, read
from gossip.lab.loggers.logger import Logger
from gossip.lab.loggers.mlflow_logger import MlflowLogger
from gossip.lab.loggers.tensorboard_logger import TensorBoardLogger
from gossip.lab.loggers.wandb_logger import WandbLogger
from topologies.registry import Registry

JSONL = "jsonl"
"""The name of the JSON lines, which the ranks always write themselves, whether they are selected or not."""

LOGGERS: Registry[type[Logger]] = Registry(
    "logger", {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}
)

SECTIONS = ("logger", "logging")
"""The config sections that concern loggers."""

_KEEP_A_MODEL = ("wandb", "mlflow")


class LoggingSettings(Model):
    """The settings common to all loggers of a run; ``configs/train.yaml`` explains each."""

    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    model: bool = False
    wait_s: PositiveFloat = 30.0


def logging_settings(config: Mapping[str, Any]) -> LoggingSettings:
    """Read and check the section ``logging``; omitted values take the defaults of :class:`LoggingSettings`."""
    settings = read(LoggingSettings, config.get("logging") or {}, "logging")
    chosen = make_loggers(config)
    if settings.model and not any(name in chosen for name in _KEEP_A_MODEL):
        raise ConfigurationError(
            f"logging.model=true, but no chosen logger keeps a model; add one, logger=[{','.join(_KEEP_A_MODEL)}], or "
            "leave it out: model.safetensors is in the run's folder anyway"
        )
    return settings


def make_loggers(config: Mapping[str, Any]) -> dict[str, Logger]:
    """Return each selected logger by its name, except the JSON lines, which the ranks write themselves.

    A logger that does not exist, whose library is not installed, or that refuses its options, is refused.
    """
    section = config.get("logger") or {}
    return {name: _made(name, options) for name, options in section.items() if name != JSONL and options is not None}


def _made(name: str, options: Mapping[str, Any]) -> Logger:
    try:
        kind = LOGGERS.get(name)
    except ValueError as error:
        raise ConfigurationError(f"logger.{name}: {error}") from error
    if missing := [library for library in kind.libraries if importlib.util.find_spec(library) is None]:
        raise ConfigurationError(
            f"logger={name} needs {' and '.join(missing)}, which cannot be imported; install it, pip install "
            f"'gossip-training[{name}]' (in a clone of the repository: pip install '.[{name}]'), or leave {name} out"
        )
    check_options(f"logger.{name}", kind, options)
    with blaming(f"logger.{name}", options):
        made: Logger = kind(**options)
    return made
