"""The folder of all ranks' replicas beside a checkpoint of Lightning's, which holds their average alone."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import gossip
from gossip import GossipDataParallel

KEY = "gossip_replicas"
"""Where a checkpoint of Lightning's names what belongs to it in the folder beside it."""


def folder_beside(path: str | os.PathLike[str]) -> Path:
    """The folder of the replicas that belong to the checkpoint at ``path``, which may be a link. Local.

    Raises
    ------
    ValueError
        ``path`` is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            f"the replicas of all ranks are saved beside the checkpoint, in a folder that all ranks share, got {path}; "
            "save to a path of the file system, or the weights alone (save_weights_only=True)"
        )
    return Path(f"{os.path.realpath(path)}.gossip")


def save_replicas(model: GossipDataParallel, folder: Path, **parts: Any) -> str:
    """Save all ranks' replicas beside the newest ones that are there; their name in ``folder``. Collective."""
    return gossip.save(model, folder, keep=2, **parts).name


def keep_only(folder: Path, name: str) -> None:
    """Remove the replicas of earlier checkpoints of the same name. Local, on one rank."""
    for path in folder.glob("step_*"):
        if path.name != name:
            shutil.rmtree(path, ignore_errors=True)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's state that stays as it is while the module changes; tied weights stay tied. Local."""
    return copy.deepcopy(state)
