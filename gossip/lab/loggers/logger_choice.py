"""Which loggers a configuration chooses, and what it says of all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gossip.lab.experiments.options import FAULTS, blaming, check_options
from gossip.lab.experiments.run_settings import ConfigurationError
from gossip.lab.loggers.jsonl_logger import JsonlLogger
from gossip.lab.loggers.logger import Logger
from gossip.lab.loggers.mlflow_logger import MlflowLogger
from gossip.lab.loggers.tensorboard_logger import TensorBoardLogger
from gossip.lab.loggers.wandb_logger import WandbLogger
from topologies.registry import Registry

JSONL = "jsonl"
"""What every process of a run writes, whether it is chosen or not."""

LOGGERS: Registry[type[Logger]] = Registry(
    "logger",
    {JSONL: JsonlLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger},
)

SECTIONS = ("logger", "logging")
"""What of a configuration is about loggers."""

_KEEP_A_MODEL = ("wandb", "mlflow")


@dataclass(frozen=True)
class LoggingSettings:
    """What is the same for all loggers of a run.

    Attributes
    ----------
    name : str or None
        Of the run, for people; None: that of its folder.
    group : str or None
    tags : tuple of str
    ranks : {"mean", "each"}
        One run with the means over the ranks, or one for each rank.
    model : bool
        Whether the averaged model is kept by the loggers that can.
    wait_s : float
        How long the end of a run waits for loggers that have not taken everything.
    """

    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    ranks: Literal["mean", "each"] = "mean"
    model: bool = False
    wait_s: float = 30.0


def logging_settings(config: Mapping[str, Any]) -> LoggingSettings:
    """The section ``logging``; what it leaves out is as in :class:`LoggingSettings`.

    Raises
    ------
    ConfigurationError
        A value cannot be, or does not go with the rest of the configuration.
    """
    section = config.get("logging") or {}
    check_options("logging", LoggingSettings, section)
    settings = LoggingSettings(**section)
    chosen = make_loggers(config)
    if not settings.wait_s > 0:
        raise ConfigurationError(f"logging.wait_s must be a positive number of seconds, got {settings.wait_s}")
    if settings.ranks == "each" and config.get("engine") == "virtual" and chosen:
        raise ConfigurationError(
            "logging.ranks=each is for ranks that are processes, and engine=virtual has the means only; set "
            "logging.ranks=mean, or engine=processes"
        )
    if settings.model and not any(name in chosen for name in _KEEP_A_MODEL):
        raise ConfigurationError(
            f"logging.model=true, but no chosen logger keeps a model; add one, logger=[{','.join(_KEEP_A_MODEL)}], or "
            "leave it out: model.safetensors is in the run's folder anyway"
        )
    return settings


def make_loggers(config: Mapping[str, Any]) -> dict[str, Callable[[], Logger]]:
    """What makes each chosen logger, by its name; all but the JSON lines, which the ranks write themselves.

    Raises
    ------
    ConfigurationError
        A logger does not exist, lacks its library, or cannot be made with its options.
    """
    section = config.get("logger") or {}
    return {
        name: _maker(name, options)
        for name, options in section.items()
        if name != JSONL and options is not None  # None: as a run of an earlier version has it in its configuration
    }


def _maker(name: str, options: Mapping[str, Any]) -> Callable[[], Logger]:
    try:
        kind = LOGGERS.get(name)
    except ValueError as error:
        raise ConfigurationError(f"logger.{name}: {error}") from error
    missing = [library for library in kind.libraries if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigurationError(
            f"logger={name} needs {' and '.join(missing)}, which cannot be imported; install it, pip install "
            f"'gossip-training[{name}]' (in a clone of the repository: pip install '.[{name}]'), or leave {name} out"
        )
    check_options(f"logger.{name}", kind, options)
    make = partial(kind, **options)
    try:
        make()
    except ConfigurationError:
        raise
    except FAULTS as error:
        raise blaming(f"logger.{name}", options, error, lambda _: False) from error
    return make
