"""Which messages are sent now, of those that could be: what belongs to older exchanges goes first, both ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gossip.communication.worker_threads import WINDOW_BYTES

#: Who has taken, or sent, nothing for so long is left out of the account: it must hold nobody else up.
PATIENCE_S = 0.3


class UnderWay(NamedTuple):
    """A message to a member or from it that has not ended.

    Attributes
    ----------
    number : int
        Counts the messages of this rank, both ways, in the order of their exchanges.
    member : int
    num_bytes : int
        Of the whole message: one that has nearly ended counts like one that has not begun.
    is_sent : bool
        By this rank, and not to it.
    quiet_s : float
        For how long the member has taken nothing, or sent no sign of life.
    """

    number: int
    member: int
    num_bytes: int
    is_sent: bool
    quiet_s: float


def whose_turn(messages: Iterable[UnderWay]) -> list[int]:
    """Return the members to whom something is sent now: all before whose messages only so much is under way.

    A rank that went on to send messages of the next exchange, while it still receives those of this one, would share
    the link of their receiver with a rank that is behind, and so delay it further: steps would be long and short in
    turns, and the links idle for a fifth of the time. So the order of the exchanges counts both ways, and large
    messages follow each other.

    Parameters
    ----------
    messages : iterable of UnderWay
        Those from a member are the ones that it is ready to send. What a rank has still to compute is not waited for.

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
