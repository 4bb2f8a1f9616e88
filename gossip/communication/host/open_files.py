"""The limit on open files: sockets and shared memory count, and errors do not name it."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from gossip.errors import GossipError, causes

_HIDDEN = ("too many open files", "failed to init uv loop")  # in the texts of errors without a number


def check_open_files(rank: int, world_size: int) -> None:
    """Raise if this process cannot open as many files as connecting to the other ranks takes. Local.

    Without them libraries end the process, or try again until their time-out.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(int(number) < soft for number in os.listdir("/dev/fd")) - 1  # without the one that lists them
    num_needed = 4 + 3 * world_size
    if soft != resource.RLIM_INFINITY and soft - num_open < num_needed:
        raise GossipError(
            f"rank {rank}: too few open files: connecting to the other ranks takes about {num_needed} more, but "
            f"{num_open} are open and {_limit_in_words()}"
        )


@contextlib.contextmanager
def limit_named() -> Iterator[None]:
    """Name the limit in a note to an error within the block that it has caused. Local."""
    try:
        yield
    except BaseException as error:
        if any(map(_is_from_limit, causes(error))) and not hasattr(error, "__notes__"):
            error.add_note(f"too many open files: {_limit_in_words()}")
        raise


def _limit_in_words() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the limit of this process is {soft}; raise it with `ulimit -n`, beyond {hard} as an administrator"


def _is_from_limit(error: BaseException) -> bool:
    has_number = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    return has_number or any(text in str(error).lower() for text in _HIDDEN)
