"""An exception in a thread of ours ends its rank with its own traceback; the other ranks notice at once."""

import threading
import traceback
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import make_model, targets
from test_world import Never
from tiers import rest_is_slow

from gossip import GossipError
from gossip.algorithms.asynchronous import Asynchronous
from gossip.communication.host.worker_threads import Operation, Ticket, WorkerThreads
from gossip.communication.liveness.progress_markers import ProgressMarkers
from gossip.communication.waiting import wait_for
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.membership_consensus import Consensus
from gossip.exchange.pair_averaging import PairAverager

STEP = 5
TIMEOUT = timedelta(seconds=20)


class InjectedError(Exception):
    """A bug of ours, whatever it may be."""


def fail(*_: Any, **__: Any) -> Any:
    raise InjectedError("a bug")


def failing_beside(owner: Any, name: str) -> Any:
    """A patch by which a method fails in every thread but the one that trains."""
    method = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        is_training = threading.current_thread() is threading.main_thread()
        return method(*args, **options) if is_training else fail()

    return mock.patch.object(owner, name, call)


PLACES: dict[str, tuple[type, str, dict[str, Any]]] = {
    "the agreement looks": (Consensus, "_is_due", {}),
    "the mesh handles a frame": (Mesh, "put", {}),
    "averages": (PairAverager, "answer", {"algorithm": Asynchronous(max_staleness=1)}),
}


def train(place: str) -> tuple[str, str]:
    """The text of the error and its traceback; on the rank that goes on, whom it has lost."""
    rank = torch.distributed.get_rank()
    owner, name, options = PLACES[place]
    model = make_model(4, {"topology": "complete", "min_ranks": 1, **options})
    target = targets(rank, 4)
    try:
        for _ in range(STEP):
            model(target).backward()
        if rank == 0:
            failing_beside(owner, name).start()
        while not model.world.mesh.lost:  # type: ignore[attr-defined]
            model(target).backward()
        for _ in range(STEP):
            model(target).backward()
    except GossipError as error:
        return str(error), "".join(traceback.format_exception(error))
    finally:
        mock.patch.stopall()
        lost = dict(model.world.mesh.lost)  # type: ignore[attr-defined]
        model.close()
    return str(lost), ""


@pytest.mark.parametrize("place", rest_is_slow(PLACES, 2))
def test_a_rank_ends_with_what_its_thread_raised_and_the_other_goes_on(place: str) -> None:
    (text, trace), (lost, _) = unsupervised.results_of(train, place, world_size=2)
    assert text == "rank 0: a thread that replies to other ranks has failed: InjectedError('a bug')"
    assert 'raise InjectedError("a bug")' in trace, "where it happened"
    assert lost.startswith("{0: ")


def test_jobs_fail_with_what_their_thread_raised() -> None:
    threads = WorkerThreads("gossip-test", TIMEOUT)
    with mock.patch.object(Ticket, "post", fail):
        first = threads.submit(iter([(Operation("a peer", mock.Mock()),)]))
        assert first.wait(TIMEOUT)
    second = threads.submit(iter([]))
    assert second.wait(TIMEOUT)
    assert [str(ticket.error) for ticket in (first, second)] == ["a bug", "a bug"]
    assert all(
        "fail" in str(traceback.extract_tb(ticket.error.__traceback__)) for ticket in (first, second) if ticket.error
    )
    assert threads.close(TIMEOUT)


def test_a_long_wait_ends_with_what_its_thread_raised() -> None:
    progress_markers = ProgressMarkers(dist.HashStore(), 0, 2)
    with (
        mock.patch.object(ProgressMarkers, "read", fail),
        pytest.raises(GossipError, match=r"rank 0: x: .*a bug") as caught,
    ):
        wait_for(Never(), progress_markers, TIMEOUT, where="x", ranks=lambda: [1])
    assert isinstance(caught.value.__cause__, InjectedError)


def test_progress_markers_raise_what_their_thread_raised() -> None:
    progress_markers = ProgressMarkers(dist.HashStore(), 0, 2)
    with mock.patch.object(ProgressMarkers, "_meet", fail), pytest.raises(InjectedError):
        progress_markers.wait_for_all(TIMEOUT)
