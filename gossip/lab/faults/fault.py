"""What goes wrong on a rank, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "freeze", "leave", "cut", "delay", "lose", "full disk"]
Place = Literal[
    "sending",
    "agreeing",
    "together",
    "telling",
    "listening",
    "calling",
    "saving",
    "giving",
    "taking",
    "asking",
    "entering",
]


@dataclass(frozen=True)
class Fault:
    """One fault of one rank; see :func:`gossip.lab.faults.injection.injected`.

    Attributes
    ----------
    kind : str
        "kill": SIGKILL. "freeze": SIGSTOP, and SIGCONT after ``duration_s``, if that is not None. "leave": SIGTERM.
        "cut": for ``duration_s`` nothing goes to ``peers`` and nothing is read from them. "delay": for ``duration_s``
        everything that goes to ``peers`` is held back so long. "lose": the messages of the step to ``peers`` are never
        sent. "full disk": while it writes its part of a checkpoint there is no space left.
    place : str
        "sending": when it hands over a bucket's messages of a step, or has sent ``num_bytes`` of one. "agreeing": when
        it has proposed who trains. "together": in the n-th exchange of what all ranks do together, ``step`` being n.
        "telling": when one of the others has been told a yes or no of the step, and the rest have not. "saving": when
        it writes its part of a checkpoint. "listening", "calling": before it says where it listens, and before it
        connects. "giving": before the first piece of a state that it gives; "taking": when it has the first piece of
        one; "asking": before it asks to be let in; "entering": when it has been.
    step, bucket : int
    num_bytes : int or None
        That have been sent of the message's frame, but not all of it; None: before the messages are handed over.
    duration_s : float or None
    peers : tuple of int
        Members; none: all of them.
    """

    kind: Kind = "kill"
    place: Place = "sending"
    step: int = 0
    bucket: int = 0
    num_bytes: int | None = None
    duration_s: float | None = None
    peers: tuple[int, ...] = ()
