"""Digests of messages as they are sent and mixed, for an examination of a run under faults."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

VARIABLE = "GOSSIP_MESSAGE_NOTES"
"""Names a folder, if messages are to be noted there."""

Note = Callable[[str, Sequence[int | str]], None]
"""Takes "sent" or "mixed", and of a message the sender, the receiver, the rest of its key, and the digest."""


class NotesInFile:
    """Notes of a process, a line each, in a file of a folder."""

    def __init__(self, folder: str) -> None:
        self._descriptor = os.open(Path(folder) / f"{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, message: Sequence[int | str]) -> None:
        """Write a line, at once."""
        os.write(self._descriptor, f"{what} {' '.join(map(str, message))}\n".encode())


def digest(message: torch.Tensor) -> str:
    data = message.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def num_mixed_and_torn(folder: str) -> tuple[int, int]:
    """Return how many messages were mixed, and how many of them nobody had sent."""
    lines = [line for path in Path(folder).iterdir() for line in path.read_text("utf-8").splitlines()]
    sent = {line.removeprefix("sent ") for line in lines if line.startswith("sent ")}
    mixed = [line.removeprefix("mixed ") for line in lines if line.startswith("mixed ")]
    return len(mixed), sum(message not in sent for message in mixed)
