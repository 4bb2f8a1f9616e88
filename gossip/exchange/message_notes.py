"""Digests of messages as they are sent and mixed, for an examination of a run under faults."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

VARIABLE = "GOSSIP_MESSAGE_NOTES"
"""Names a folder, if messages are to be noted there."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_FILE = os.open(Path(os.environ[VARIABLE]) / f"{os.getpid()}.txt", _FLAGS) if VARIABLE in os.environ else None


def note(what: str, sender: int, receiver: int, key: Sequence[int], message: torch.Tensor) -> None:
    """Note at once, in a line of the process's file, that a message is "sent" or "mixed", if that is to be noted."""
    if _FILE is not None:
        data = message.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
        os.write(_FILE, f"{what} {sender} {receiver} {' '.join(map(str, key))} {digest}\n".encode())


def num_mixed_and_torn(folder: str) -> tuple[int, int]:
    """Return how many messages were mixed, and how many of them nobody had sent."""
    lines = [line for path in Path(folder).iterdir() for line in path.read_text("utf-8").splitlines()]
    sent = {line.removeprefix("sent ") for line in lines if line.startswith("sent ")}
    mixed = [line.removeprefix("mixed ") for line in lines if line.startswith("mixed ")]
    return len(mixed), sum(message not in sent for message in mixed)
