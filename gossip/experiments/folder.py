"""The folder of a run: taken once, filled by the launching side."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from loguru import logger

import topologies
from gossip.experiments import figures, records
from gossip.experiments.settings import ConfigurationError
from topologies import Topology

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
_PACKAGES = (
    "gossip-training",
    "torch",
    "numpy",
    "networkx",
    "loguru",
    "hydra-core",
    "omegaconf",
    "scikit-learn",
    "safetensors",
    "matplotlib",
)


class FolderError(ConfigurationError):
    """The run folder holds another run, or cannot be written."""


def new_name() -> str:
    """A name that no other run has: the time, and the process id for those that start in the same second."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}"


def claim(folder: Path, config: Mapping[str, Any]) -> None:
    """Make ``folder`` this run's: write the resolved configuration and the versions.

    Raises
    ------
    FolderError
        It holds a run already, or cannot be written.
    """
    from omegaconf import OmegaConf

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / CONFIG_FILE).open("x", encoding="utf-8") as file:
            file.write(OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    except FileExistsError:
        raise FolderError(
            f"{folder} already holds a run ({CONFIG_FILE}); remove it, or choose another folder with hydra.run.dir=..."
        ) from None
    except OSError as error:
        raise FolderError(f"the run folder {folder} cannot be written: {error.strerror}") from error
    _write_json(folder / "versions.json", _versions())


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary of a run that ended well, in one stroke."""
    partial = folder / f"{SUMMARY_FILE}.partial"
    _write_json(partial, summary)
    partial.replace(folder / SUMMARY_FILE)


def write_failure(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary of a run that failed, unless another rank has done so: the first reason is the cause."""
    try:
        with (folder / SUMMARY_FILE).open("x", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)
    except FileExistsError:
        pass


def draw_figures(folder: Path, world_size: int, topology: Topology | None) -> None:
    """Draw loss and accuracy, the consensus distance, and the topology's rounds as SVG."""
    by_rank = [records.read_jsonl(folder / f"rank{rank}.jsonl") for rank in range(world_size)]
    for draw, name in ((figures.training_figure, "training.svg"), (figures.consensus_figure, "consensus.svg")):
        try:
            draw(by_rank, folder / name)
        except ValueError as error:  # a run that diverged has no numbers to draw, but has a result
            logger.warning("{} is left out: {}", name, error)
    if topology is not None:
        topologies.draw(topology, folder / "topology.svg")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(records.without_non_finite(content), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
