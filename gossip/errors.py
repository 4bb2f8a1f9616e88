"""Exceptions raised for failures between ranks.

Invalid arguments raise ``ValueError`` or ``TypeError``; the classes here report what goes wrong between ranks.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

from loguru import logger

from topologies.registry import nearest_match

P = ParamSpec("P")
T = TypeVar("T")


class GossipError(RuntimeError):
    """Base class of every error that concerns several ranks acting together."""


class ManifestError(GossipError):
    """The ranks do not train the same thing. Raised on every rank before anything is exchanged."""


class ExchangeError(GossipError):
    """An exchange with peers failed or timed out; the text names rank, step, bucket and peers.

    Attributes
    ----------
    failed_ranks : tuple of int
        The failed ranks, numbered in the default process group, as far as they could be determined.
    """

    def __init__(
        self, message: str, *, failed_ranks: Sequence[int] = (), culprits: Sequence[int] | None = None
    ) -> None:
        super().__init__(message)
        if culprits is not None:
            warnings.warn(
                "ExchangeError(culprits=...) is deprecated; use failed_ranks", DeprecationWarning, stacklevel=2
            )
            failed_ranks = culprits
        self.failed_ranks = tuple(failed_ranks)

    @property
    def culprits(self) -> tuple[int, ...]:
        """Deprecated, use ``failed_ranks``."""
        warnings.warn("ExchangeError.culprits is deprecated; use failed_ranks", DeprecationWarning, stacklevel=2)
        return self.failed_ranks


class CannotJoinError(ExchangeError):
    """This process cannot join a training run, and could not if it tried again: restarting it is pointless."""


class EndedTogether(SystemExit):  # no error, and programs end with it
    """All ranks end, since so many received SIGTERM that too few would remain: restarting one is pointless."""


class GenerationEndedError(GossipError):
    """A rank was lost during a collective operation. The remaining ranks repeat it; callers never see this error."""


class CheckpointError(GossipError):
    """A checkpoint could not be written or loaded. Raised on every rank, so that the ranks stay in step."""


class LaunchError(GossipError):
    """A worker that :func:`gossip.launch` started failed, or could not be started.

    Attributes
    ----------
    rank : int or None
        The rank that failed first, or None if none did.
    worker_traceback : str
        The traceback of that rank as text; empty if it died without one, for example by a signal.
    """

    def __init__(self, message: str, *, rank: int | None = None, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker_traceback = worker_traceback


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one from which or during which it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reason(error: BaseException) -> str:
    """Return in one line why something failed, with errno and path if the operating system refused it."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror} (errno {error.errno}){where}"
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError | TypeError | ValueError) else f"{type(error).__name__}: {text}"


def names_arguments(instead: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function refuse an argument that it does not have with the name that was meant.

    ``instead`` says of arguments that have other names elsewhere what to do.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        def told(name: str) -> str:
            if name in instead:
                return f"{name} {instead[name]}"
            meant = nearest_match(name, known)
            return f"there is no {name}; " + (f"did you mean {meant}?" if meant else f"there are: {', '.join(known)}")

        @functools.wraps(function)
        def naming(*args: P.args, **kwargs: P.kwargs) -> T:
            if unknown := [told(name) for name in kwargs if name not in known]:
                raise TypeError("; ".join(unknown))
            return function(*args, **kwargs)

        return naming

    return decorate


def warn_user(text: str) -> None:
    """Log a warning after which the user has something to do, and issue it by ``warnings`` too, at the user's line."""
    logger.opt(depth=1).warning(text)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("gossip", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
