"""The exchange really hides behind the next iteration: when it is launched, pending and awaited."""

import functools

import torch
from torch import nn

from gossip import DistributedTransport, Exchange, GossipDataParallel, Transport, World, launch
from gossip.compression.conversation import Arrival, Conversation
from topologies import Round, Topology, build

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


class HeldExchange(Exchange):
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


def record_events() -> list[Event]:
    events: list[Event] = []
    topology = build("one_peer_exponential", 2)
    held: list[HeldTransport] = []

    def transport(world: World, topology: Topology) -> Transport:
        held.append(HeldTransport(DistributedTransport(world, topology), events))
        return held[-1]

    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
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


def test_exchanges_hide_behind_the_next_iteration() -> None:
    events = launch(record_events, world_size=2)[0]
    launches = [(step, bucket) for what, step, bucket in events if what == "launch"]
    num_buckets = 1 + max(bucket for _, bucket in launches)
    assert num_buckets >= 3
    assert launches == [(step, bucket) for step in range(NUM_STEPS) for bucket in range(num_buckets)]  # in index order
    place = {event: number for number, event in enumerate(events)}
    for step, bucket in launches:
        launched = place["launch", step, bucket]
        assert launched < place["backward ended", step, -1]
        if step < NUM_STEPS - 1:  # pending through the next forward, awaited where its bucket is updated next
            forward = place["forward begins", step + 1, -1], place["forward ends", step + 1, -1]
            released, awaited = place["release", step, bucket], place["wait", step, bucket]
            assert launched < forward[0] < forward[1] < released < awaited
            assert events[awaited + 1] == ("launch", step + 1, bucket)
    for step in range(NUM_STEPS):  # the first buckets leave while gradients of others are still to come
        assert place["launch", step, 0] < place["last gradient", step, -1]
