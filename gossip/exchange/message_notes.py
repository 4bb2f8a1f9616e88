"""Digests of messages as they are sent and mixed, for an examination of a run under faults."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

VARIABLE = "GOSSIP_MESSAGE_NOTES"
"""Names a folder, if messages are to be noted there."""


def _into_file(folder: str) -> Callable[[str, Sequence[int | str]], object]:
    """Return what writes a line for each note, at once, into this process's file in a folder."""
    file = os.open(Path(folder) / f"{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda what, message: os.write(file, f"{what} {' '.join(map(str, message))}\n".encode())


write = _into_file(os.environ[VARIABLE]) if VARIABLE in os.environ else None
"""Takes "sent" or "mixed", and of a message the sender, the receiver, the rest of its key, and the digest."""


def note(what: str, sender: int, receiver: int, key: Sequence[int], message: torch.Tensor) -> None:
    """Note that a message is "sent" or "mixed", if that is to be noted."""
    if write is not None:
        data = message.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
        write(what, [sender, receiver, *key[1:], digest])


def num_mixed_and_torn(folder: str) -> tuple[int, int]:
    """Return how many messages were mixed, and how many of them nobody had sent."""
    lines = [line for path in Path(folder).iterdir() for line in path.read_text("utf-8").splitlines()]
    sent = {line.removeprefix("sent ") for line in lines if line.startswith("sent ")}
    mixed = [line.removeprefix("mixed ") for line in lines if line.startswith("mixed ")]
    return len(mixed), sum(message not in sent for message in mixed)
