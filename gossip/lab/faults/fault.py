"""Description of a fault: what goes wrong on a rank, and where."""

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
        The kind of the fault. "kill": SIGKILL. "freeze": SIGSTOP, and SIGCONT after ``duration_s`` unless that is None.
        "leave": SIGTERM. "cut": for ``duration_s``, nothing is sent to ``peers`` and nothing is read from them.
        "delay": for ``duration_s``, everything to be sent to ``peers`` is held back until that time has passed. "lose":
        the messages of the step to ``peers`` are never sent. "full disk": no space is left on the device while the rank
        writes its part of a checkpoint.
    place : str
        The place at which the fault happens. "sending": when the rank hands over a bucket's messages of a step, or has
        sent ``num_bytes`` of one. "agreeing": after it has proposed which ranks train. "together": in the n-th
        collective exchange of all ranks, where n is ``step``. "telling": after one of the other ranks has been told yes
        or no about the step, and before the rest are told. "saving": when it writes its part of a checkpoint.
        "listening": before it announces the address at which it listens. "calling": before it connects. "giving":
        before it sends the first piece of a state. "taking": after it has received the first piece of a state.
        "asking": before it asks to be admitted. "entering": after it has been admitted.
    step, bucket : int
        The step and the bucket of the fault.
    num_bytes : int or None
        The number of bytes of the message's frame that are sent before the fault, always less than the whole frame;
        None: the fault happens before the messages are handed over.
    duration_s : float or None
        The duration of a temporary fault.
    peers : tuple of int
        The member numbers of the affected peers; empty: all of them.
    """

    kind: Kind = "kill"
    place: Place = "sending"
    step: int = 0
    bucket: int = 0
    num_bytes: int | None = None
    duration_s: float | None = None
    peers: tuple[int, ...] = ()
