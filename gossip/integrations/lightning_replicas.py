"""The folder of all ranks' replicas next to a Lightning checkpoint, which holds only their average."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import gossip
from gossip import GossipDataParallel

KEY = "gossip_replicas"
"""The key under which a Lightning checkpoint names its replicas in the folder next to it."""


def folder_beside(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the replicas that belong to the checkpoint at ``path``, which may be a link. Local.

    Raises
    ------
    ValueError
        ``path`` is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            "the replicas of all ranks are saved next to the checkpoint, in a folder that all ranks share, got "
            f"{path}; "
            "save to a path in the file system, or only the weights (save_weights_only=True)"
        )
    return Path(f"{os.path.realpath(path)}.gossip")


def save_replicas(model: GossipDataParallel, folder: Path, **parts: Any) -> str:
    """Save all ranks' replicas next to the newest existing ones, and return their name in ``folder``. Collective."""
    return gossip.save(model, folder, keep=2, **parts).name


def keep_only(folder: Path, name: str) -> None:
    """Remove the replicas of earlier checkpoints of the same name. Local, on one rank."""
    for path in folder.glob("step_*"):
        if path.name != name:
            shutil.rmtree(path, ignore_errors=True)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a module's state that does not follow the module; tied weights stay tied. Local."""
    return copy.deepcopy(state)
