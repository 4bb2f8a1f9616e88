"""Which of the pending messages are sent now: those of older exchanges go first, in both directions."""

from collections.abc import Iterable
from typing import NamedTuple

from gossip.communication.host.worker_threads import WINDOW_BYTES

#: A member that has accepted or sent nothing for this long is not counted, so that it delays no other.
PATIENCE_S = 0.3


class UnderWay(NamedTuple):
    """A message to or from a member that has not ended."""

    number: int  # counts the messages of this rank, in both directions, in the order of their exchanges
    member: int
    num_bytes: int  # of the whole message: one that has nearly ended counts like one that has not begun
    is_sent: bool  # by this rank; otherwise it receives it
    quiet_s: float  # for how long the member has accepted nothing, or given no sign of life


def whose_turn(messages: Iterable[UnderWay]) -> list[int]:
    """Return the members to which something is sent now: those whose messages are preceded by few enough bytes.

    A rank that goes on to send messages of the next exchange, while it still receives those of this one, would share
    the link of their receiver with a rank that is behind, and so delay it further: steps would be alternately long and
    short, and the links idle for a fifth of the time. Therefore the order of exchanges applies in both directions, and
    large messages follow each other.

    Parameters
    ----------
    messages : iterable of UnderWay
        The messages; those from a member are the ones that it is ready to send. Messages that a rank has yet to compute
        are not waited for.

    Examples
    --------
    >>> to_0, to_2 = UnderWay(0, 0, 4_000_000, True, 0.0), UnderWay(3, 2, 4_000_000, True, 0.0)
    >>> whose_turn([to_2, to_0])
    [0]
    >>> whose_turn([UnderWay(1, 1, 4_000_000, False, 0.0), to_2]), whose_turn([to_2])
    ([], [2])
    >>> whose_turn([to_0._replace(quiet_s=1.0), to_2])
    [0, 2]
    """
    found: dict[int, None] = {}
    num_bytes_before = 0
    for message in sorted(messages, key=lambda message: message.number):
        if num_bytes_before >= WINDOW_BYTES:
            break
        if message.is_sent:
            found[message.member] = None
        if message.quiet_s < PATIENCE_S:
            num_bytes_before += message.num_bytes
    return list(found)
