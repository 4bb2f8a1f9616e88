"""Description of a fault: what goes wrong on a rank, and where."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("kill", "freeze", "leave", "cut", "delay")


@dataclass(frozen=True)
class Fault:
    """One fault of one rank; see :func:`gossip.lab.faults.injection.injected`.

    Attributes
    ----------
    kind : str
        One of :data:`KINDS`. "kill": SIGKILL. "freeze": SIGSTOP, and SIGCONT after ``duration_s`` unless that is None.
        "leave": SIGTERM. "cut": for ``duration_s``, nothing is sent to ``peers`` and nothing is read from them.
        "delay": for ``duration_s``, everything to be sent to ``peers`` is held back until that time has passed.
    place : str
        "sending": when the rank hands over a bucket's messages of a step, or has sent ``num_bytes`` of one.
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

    kind: str = "kill"
    place: str = "sending"
    step: int = 0
    bucket: int = 0
    num_bytes: int | None = None
    duration_s: float | None = None
    peers: tuple[int, ...] = ()
