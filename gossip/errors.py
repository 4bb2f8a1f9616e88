"""The exceptions that are this project's own.

What a caller passed wrongly raises ``ValueError`` or ``TypeError``; these are for what goes wrong between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


class GossipError(RuntimeError):
    """Base of every error that is about what several ranks do together."""


class ManifestError(GossipError):
    """Two ranks do not train the same thing: raised on every rank, before anything is exchanged."""


class ExchangeError(GossipError):
    """An exchange with peers failed or timed out; names rank, step, bucket and peers.

    Attributes
    ----------
    culprits : tuple of int
        The ranks that stopped, in the default process group, as far as could be found out.
    """

    def __init__(self, message: str, *, culprits: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)


class NothingToJoinError(ExchangeError):
    """Nobody trains whom a process could join: it need not be started again."""


class EpochEndedError(GossipError):
    """A rank was lost in the middle of what all ranks do together: those left do it again, and never show this."""


class CheckpointError(GossipError):
    """A checkpoint could not be written, or is not one that can be loaded; raised on every rank, the ranks in step."""


class LaunchError(GossipError):
    """A worker that :func:`gossip.launch` started failed, or could not be started.

    Attributes
    ----------
    rank : int or None
        The rank that failed first, where one did.
    worker_traceback : str
        That rank's traceback as text; empty if it died without one (killed by a signal, say).
    """

    def __init__(self, message: str, *, rank: int | None = None, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker_traceback = worker_traceback
