"""Faults at places of a training where only tests inject them, besides those of ``gossip.lab.faults``."""

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast
from unittest import mock

from gossip.checkpoints import saving
from gossip.communication.row_collectives import RowCollectives
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Kind, Outgoing
from gossip.elastic.consensus_store import ConsensusStore
from gossip.elastic.elastic_world import ElasticWorld
from gossip.elastic.joining_rank import JoiningRank
from gossip.elastic.state_transfer import StateSource
from gossip.lab.faults import injection
from gossip.lab.faults.injection import MESSAGES, SENDING_PATIENCE, Fault


@contextlib.contextmanager
def injected(faults: Iterable[Fault]) -> Iterator[None]:
    """Inject faults into this process within the block, each of them once.

    Beside the kinds that ranks meet, "lose": the messages of the step to ``peers`` are never sent, and "full disk".
    """
    with contextlib.ExitStack() as stack:
        for fault in faults:
            if fault.kind == "lose":
                stack.enter_context(mock.patch.object(Mesh, "send", _losing(Mesh.send, fault)))
            elif fault.place in PLACES:
                stack.enter_context(injection.patched(*PLACES[fault.place], fault, lambda fault=fault: _happen(fault)))
            else:
                stack.enter_context(injection.injected([fault]))
        yield


def _happen(fault: Fault) -> None:
    if fault.kind == "full disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    injection.happen(fault)


def _losing(send: Any, fault: Fault) -> Any:
    """Return a replacement of ``send`` that loses the messages of one step and one bucket."""

    def send_or_lose(self: Mesh, member: int, key: Any, *more: Any) -> Outgoing:
        is_lost = key.kind in MESSAGES and key[1:3] == (fault.step, fault.bucket)
        if is_lost and (not fault.peers or member in fault.peers):
            frame = Outgoing(key)
            frame.end()
            return frame
        return cast("Outgoing", send(self, member, key, *more))

    return send_or_lose


def _together(exchange: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    count = [0]

    def exchange_or_happen(self: Any, *args: Any, turn: int | None = None, **options: Any) -> Any:
        count[0] += turn is None
        if count[0] > fault.step:
            happen()
        return exchange(self, *args, turn=turn, **options)

    return exchange_or_happen


def _telling(send: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    def send_and_happen(self: Any, member: int, key: Any, *more: Any) -> Any:
        frame = send(self, member, key, *more)
        if key.kind == Kind.FLAG_VOTE and key.second >= fault.step:
            with self.changed:
                self.changed.wait_for(lambda: frame.has_ended, SENDING_PATIENCE.total_seconds())
            happen()
        return frame

    return send_and_happen


def _before(
    call: Any, _: Fault, happen: Callable[[], None], is_meant: Callable[..., bool] = lambda *_, **__: True
) -> Any:
    def happen_and_call(*args: Any, **keywords: Any) -> Any:
        if is_meant(*args, **keywords):
            happen()
        return call(*args, **keywords)

    return happen_and_call


def _giving(send: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    return _before(send, fault, happen, lambda _, __, piece, ___, part: (piece, part) == (1, 0))


def _given(forget: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    return _before(forget, fault, happen, lambda _, __, part: part == 0)


def _within(call: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    count = itertools.count()

    def call_and_happen(*args: Any, **keywords: Any) -> Any:
        found = call(*args, **keywords)
        if next(count) >= fault.step:
            happen()
        return found

    return call_and_happen


def _after(call: Any, _: Fault, happen: Callable[[], None]) -> Any:
    def call_and_happen(*args: Any, **keywords: Any) -> Any:
        found = call(*args, **keywords)
        happen()
        return found

    return call_and_happen


PLACES: dict[str, tuple[tuple[Any, ...], str, Callable[[Any, Fault, Callable[[], None]], Any]]] = {
    "agreeing": ((ConsensusStore,), "_set_once", _after),  # it has proposed which ranks train
    "together": ((ElasticWorld,), "exchange", _together),  # in the n-th exchange of all ranks, where n is ``step``
    # In the n-th collective of a shard group, where n is ``step`` as well.
    "gathering": ((RowCollectives,), "begin_gather", _within),
    "summing": ((RowCollectives,), "begin_sum", _within),
    "telling": ((Mesh,), "send", _telling),  # one of the others has been told yes or no, the rest have not
    "saving": ((saving,), "write_tensors", _before),
    "calling": ((Mesh,), "connect", _before),
    "giving": ((StateSource,), "_send", _giving),  # before the first piece of a state
    "given": ((StateSource,), "_forget", _given),  # the first part of a state has arrived, the second is not due yet
    "entering": ((JoiningRank,), "be_admitted", _after),
}
