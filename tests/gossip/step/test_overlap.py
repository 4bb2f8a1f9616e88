"""The exchange really hides behind the next iteration: when it is launched, pending and awaited."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from torch import nn

from gossip import DistributedTransport, Exchange, GossipDataParallel, Transport, World, launch
from gossip.compression.conversation import Arrival, Conversation
from topologies import Round, Topology, build

pytestmark = pytest.mark.xdist_group("overlap")  # what its fixtures make is made once

NUM_STEPS = 4
Event = tuple[str, int, int]
"""(what, step, bucket); bucket -1 where there is none."""


class HeldTransport(Transport):
    """Delays and records: a message leaves only when `release` is called, and not before the next forward has ended."""

    def __init__(self, transport: Transport, events: list[Event]) -> None:
        self.transport = transport
        self.events = events
        self.held: list[HeldExchange] = []

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> Exchange:
        self.events.append(("launch", step, bucket))
        start = functools.partial(self.transport.start, conversation, round_, step=step, bucket=bucket)
        self.held.append(HeldExchange(start, self.events, step, bucket))
        return self.held[-1]

    def release(self) -> None:
        for exchange in self.held:
            exchange.release()
        self.held.clear()


class HeldExchange:
    bytes_by_peer: Mapping[int, int] = MappingProxyType({})
    arrived_at: Mapping[int, float] = MappingProxyType({})

    def __init__(self, start: functools.partial[Exchange], events: list[Event], step: int, bucket: int) -> None:
        self.start, self.events, self.step, self.bucket = start, events, step, bucket
        self.inner: Exchange | None = None

    def release(self) -> None:
        self.events.append(("release", self.step, self.bucket))
        self.inner = self.start()

    def wait(self) -> Arrival:
        self.events.append(("wait", self.step, self.bucket))
        assert self.inner is not None, "awaited while it was still held: nothing was hidden"
        return self.inner.wait()


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def record_events() -> list[Event]:
    events: list[Event] = []
    topology = build("one_peer_exponential", 2)
    held: list[HeldTransport] = []

    def transport(world: World, topology: Topology) -> Transport:
        held.append(HeldTransport(DistributedTransport(world, topology), events))
        return held[-1]

    module = make_module()
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    model = GossipDataParallel(module, optimizer, topology, bucket_cap_mb=300 / 2**20, transport=transport)
    module.register_forward_pre_hook(lambda *_: events.append(("forward begins", model.step, -1)))
    module.register_forward_hook(lambda *_: events.append(("forward ends", model.step, -1)))
    for step in range(NUM_STEPS):
        inputs = torch.randn(4, 8, requires_grad=True)
        # The input's gradient is the last one of the pass.
        inputs.register_hook(lambda _, step=step: events.append(("last gradient", step, -1)))
        loss = model(inputs).square().mean()
        held[0].release()
        loss.backward()
        events.append(("backward ended", step, -1))
    held[0].release()
    model.close()
    return events


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return launch(record_events, world_size=2)[0]


def test_every_step_launches_every_bucket_in_index_order(events: list[Event]) -> None:
    launches = [(step, bucket) for what, step, bucket in events if what == "launch"]
    num_buckets = 1 + max(bucket for _, bucket in launches)
    assert num_buckets >= 3
    assert launches == [(step, bucket) for step in range(NUM_STEPS) for bucket in range(num_buckets)]


def test_exchange_is_launched_before_backward_ends(events: list[Event]) -> None:
    for step in range(NUM_STEPS):
        ended = events.index(("backward ended", step, -1))
        assert all(position < ended for position, event in enumerate(events) if event[:2] == ("launch", step))
        # The first buckets leave while gradients of others are still to come.
        assert events.index(("launch", step, 0)) < events.index(("last gradient", step, -1))


def test_exchange_is_pending_through_the_next_forward(events: list[Event]) -> None:
    for what, step, bucket in events:
        if what == "launch" and step < NUM_STEPS - 1:
            launched = events.index(("launch", step, bucket))
            forward = events.index(("forward begins", step + 1, -1)), events.index(("forward ends", step + 1, -1))
            released, awaited = events.index(("release", step, bucket)), events.index(("wait", step, bucket))
            assert launched < forward[0] < forward[1] < released < awaited


def test_exchange_is_awaited_only_where_its_bucket_is_updated_next(events: list[Event]) -> None:
    waits = [position for position, (what, _, _) in enumerate(events) if what == "wait"]
    assert waits
    for position in waits:
        _, step, bucket = events[position]
        if step < NUM_STEPS - 1:  # what the last step launched is awaited by close()
            assert events[position + 1] == ("launch", step + 1, bucket)
