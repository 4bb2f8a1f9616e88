"""Whether the key-value store still replies: training does not need it before ranks are lost, leave or join."""

import threading
import time
from collections.abc import Callable

from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.communication.liveness.progress_markers import STORE_PATIENCE_S
from gossip.elastic.consensus_store import ConsensusStore, StoreLost

_INTERVAL_S = 1.0


class StoreMonitor:
    """Asks the store every second, in a thread of its own, and says once if it does not reply.

    A store that was only silent, because its process or its host's network stood still, may reply again, which is said
    too. A connection that is closed stays closed: ranks do not connect to another store. ``failed`` is called with an
    exception of the thread that is not the store's.

    Attributes
    ----------
    status : callable, optional
        Returns what this rank says of itself for ``gossip status``, which is written every second; None writes nothing.
    is_lost : bool
        Whether the store does not reply, so that the next rank that is lost or leaves ends the training.
    """

    def __init__(self, member: int, consensus_store: ConsensusStore, failed: Callable[[Exception], object]) -> None:
        self.status: Callable[[], object] | None = None
        self.is_lost = False
        self._member = member
        self._consensus_store = consensus_store
        self._asked_at: float | None = None
        self._stop = threading.Event()
        self._thread = daemon_threads.start(
            f"gossip-store-{member}",
            daemon_threads.weak_run(self, StoreMonitor._ask),
            end=self._stop.set,
            failed=failed,
        )

    def look(self, now: float) -> None:
        """Note whether the thread has waited for long for a reply; ``now`` is of ``time.monotonic()``."""
        asked_at = self._asked_at
        if asked_at is not None and now - asked_at > STORE_PATIENCE_S:
            self._lose(f"the key-value store has not replied for {STORE_PATIENCE_S:g} s")

    def _ask(self) -> bool:
        """Ask once and wait; return whether to continue."""
        self._asked_at = time.monotonic()
        try:
            self._consensus_store.is_proposed(0)  # which waits for a reply
            if self.status is not None:
                self._consensus_store.note_status(self._member, self.status())
        except StoreLost as error:
            self._lose(str(error))
            return False
        finally:
            self._asked_at = None
        if self.is_lost:
            self.is_lost = False
            logger.warning(
                "rank {}: the key-value store replies again; ranks may be lost, leave and join", self._member
            )
        return not self._stop.wait(_INTERVAL_S)

    def _lose(self, why: str) -> None:
        if not (self.is_lost or self._stop.is_set()):
            self.is_lost = True
            logger.error(
                "rank {}: {}: the ranks keep training, but the next one that is lost or leaves ends the training of "
                "all, and none can join; save a checkpoint now",
                self._member,
                why,
            )

    def close(self) -> None:
        """End the thread, unless it waits for the store. Local."""
        self._stop.set()
        self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())
