"""The contract of transports: what arrives is sum_j W[i, j] m_j, whatever the round, dtype, size and traffic."""

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
from covering import covering
from exchanging import start
from ranks import on_ranks

import gossip
import topologies
from gossip.communication.device_paths import Tensors
from gossip.communication.host.worker_threads import Job
from gossip.exchange.distributed_transport import shared_groups
from gossip.exchange.transport import make_transport
from topologies import Topology

WORLD_SIZE = 4
TRANSPORTS: dict[str, Callable[[gossip.World, Topology], gossip.Transport]] = {
    "distributed": gossip.DistributedTransport,
    "on other machines": functools.partial(gossip.DistributedTransport, shares_memory=False),
    "debug": gossip.DebugTransport,
}
TOPOLOGIES = {
    name: topologies.build(name, WORLD_SIZE)
    for name in ("complete", "ring", "star", "directed_ring", "exponential", "one_peer_exponential", "one_peer_ring")
} | {"random_matching": topologies.build("random_matching", WORLD_SIZE, seed=1)}
TOPOLOGIES["complete.then"] = TOPOLOGIES["complete"].then(TOPOLOGIES["random_matching"], after=1)
VALUES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
KINDS: dict[str, tuple[gossip.Compression, torch.dtype, float]] = {
    **{str(dtype): (gossip.Uncompressed(), dtype, tolerance) for dtype, tolerance in VALUES.items()},
    "bf16": (gossip.Cast(torch.bfloat16), torch.float32, 1e-2),
    "int8": (gossip.ModuloQuantization(8), torch.float32, 5e-2),
}
SIZES = (1, 7, 40_001, 150_007)  # large ones are read in memory; over a network the last one goes in pieces
NUM_STEPS = 5  # more than there are buffers


@functools.cache
def random_numbers() -> torch.Tensor:
    return torch.randn(2 * max(SIZES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def values_of(rank: int, step: int, bucket: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers from another place on: to draw as many anew would take most of the time."""
    start = 1 + 1009 * (rank + WORLD_SIZE * step + WORLD_SIZE * NUM_STEPS * bucket)
    return random_numbers()[start : start + SIZES[bucket]].to(dtype, copy=True)


CASES = covering(itertools.product(TRANSPORTS, TOPOLOGIES, map(str, VALUES)))
CASES += itertools.product(TRANSPORTS, ["ring"], ["bf16", "int8"])  # which are never added on the wire


@pytest.mark.parametrize("name", TRANSPORTS)
@on_ranks(WORLD_SIZE)
def test_what_arrives_is_the_row_of_the_mixing_matrix(name: str) -> None:
    """All topologies and kinds of messages over one transport; several buckets are in flight at once."""
    for label, kind in [(label, kind) for carrier, label, kind in CASES if carrier == name]:
        (compression, dtype, tolerance), topology = KINDS[kind], TOPOLOGIES[label]
        world = gossip.World(timedelta(seconds=60))
        transport = TRANSPORTS[name](world, topology)
        codecs = [
            compression.codec(
                gossip.BucketShape(bucket, torch.empty(size, dtype=dtype), memory=memory_of(transport, bucket)),
                world.rank,
            )
            for bucket, size in enumerate(SIZES)
        ]
        for step in range(NUM_STEPS):
            round_ = topology.round(step)
            exchanges = []
            for bucket, codec in enumerate(codecs):
                values = values_of(world.rank, step, bucket, dtype)
                conversation = codec.begin(values, round_, step)
                exchanges.append(transport.start(conversation, round_, step=step, bucket=bucket))
                values.fill_(torch.nan)  # the message does not need it any more
            for bucket in reversed(range(len(SIZES))):
                difference = torch.cat([part.clone() for _, part in exchanges[bucket].wait().parts])
                everyone = torch.stack(
                    [values_of(rank, step, bucket, dtype).double() for rank in range(WORLD_SIZE)]
                ).numpy()
                row = round_.matrix()[world.rank] @ everyone - everyone[world.rank]
                error = np.abs(difference.double().numpy() - row).max()
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                assert error <= tolerance * np.abs(everyone).max(), f"{label} {kind} step {step} bucket {bucket}"
                assert difference.dtype == wide, f"{label} {kind} step {step} bucket {bucket}"
        if isinstance(transport, gossip.DistributedTransport):
            assert len(transport.local_messages.local) == (WORLD_SIZE - 1 if name == "distributed" else 0)
        world.close()


def memory_of(transport: gossip.Transport, bucket: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda message, step: transport.memory(message, step=step, bucket=bucket)


@on_ranks(WORLD_SIZE)
def test_bytes_sent_are_those_of_the_ring_all_reduce_or_of_the_messages() -> None:
    sent = {}
    for label, topology in TOPOLOGIES.items():
        world = gossip.World(timedelta(seconds=60))
        transport = gossip.DistributedTransport(world, topology)
        for numel in (100, 100_000):
            exchange = start(transport, torch.ones(numel), topology.round(0), world=world, step=0, bucket=0)
            exchange.wait()
            sent[f"{label} {numel}"] = sum(exchange.bytes_by_peer.values())
        world.close()
    assert sent["complete 100000"] == 2 * 400_000 * 3 // 4
    for numel in (100, 100_000):
        message = 4 * numel
        for pairs in ("one_peer_ring", "random_matching", "one_peer_exponential", "directed_ring"):
            assert sent[f"{pairs} {numel}"] == message
        assert sent[f"ring {numel}"] == sent[f"exponential {numel}"] == 2 * message
        assert sent[f"star {numel}"] == (1 if world.rank else 3) * message
    assert sent["complete 100"] == 3 * 400


@on_ranks(WORLD_SIZE, anew=True)
def test_receives_are_posted_before_sends() -> None:
    # gloo moves two large messages in turn, not both at once, if the sends are posted first.
    topology = TOPOLOGIES["exponential"]
    world = gossip.World(timedelta(seconds=60))
    transport = gossip.DistributedTransport(world, topology)
    group, world.group = world.group, mock.Mock()
    world.group.recv.return_value = world.group.send.return_value = None
    exchanges = [
        start(transport, torch.ones(5), topology.round(0), world=world, step=0, bucket=bucket) for bucket in range(2)
    ]
    for exchange in exchanges:
        assert exchange.pending.wait(timedelta(seconds=60))
    calls, world.group = [(name, *args[1:]) for name, args, _ in world.group.mock_calls], group
    world.close()
    in_order = [("recv", 1), ("recv", 2), ("send", 2), ("send", 3)] * 2
    assert world.rank or [(kind, rank) for kind, rank, _ in calls] == in_order
    tags = [tag for _, _, tag in calls]
    assert len(set(tags[:4])) == len(set(tags[4:])) == 1
    assert tags[0] != tags[4]


@pytest.mark.parametrize("weights", [[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]]])
def test_messages_that_the_starting_thread_itself_posts_are_made_before(weights: list[list[float]]) -> None:
    """As those of a device by NCCL are: nobody else could make them meanwhile."""
    world, posted = mock.MagicMock(rank=0, world_size=2), list[list[object]]()
    world.gather_json.side_effect = lambda content, _: [content] * 2

    def post_at_once(make_job: Callable[..., Job], sent: Tensors, received: Tensors) -> mock.Mock:
        posted.extend(list(works) for works in make_job(sent, received) if works)
        return mock.Mock(finished_at={})

    world.device_paths.submit.side_effect = post_at_once
    transport = gossip.DistributedTransport(world, TOPOLOGIES["ring"])
    round_ = topologies.Round.from_matrix(np.array(weights))
    start(transport, torch.ones(5, device="meta"), round_, world=world, step=0, bucket=0)
    assert len(posted) == 1


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        (3, r"transport must be a name or a function \(world, topology\) -> gossip.Transport, got 3; pass a class"),
        (mock.Mock(spec=gossip.Transport), r"Mock spec='Transport' .*; pass a class such as"),
    ],
)
def test_what_is_no_factory_is_refused(transport: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        gossip.GossipDataParallel(torch.nn.Linear(3, 1), None, transport=transport)
    with pytest.raises(TypeError, match=r"returned 3; have its class extend gossip\.Transport"):
        make_transport(lambda *_: 3, None, TOPOLOGIES["ring"])  # type: ignore[arg-type,return-value]


def test_communicators_are_made_once_for_all_rounds_of_the_period_and_of_a_warm_up() -> None:
    cuboid = topologies.build("hyper_cuboid", 9, factors=(3, 3))
    everyone, threes = tuple(range(9)), shared_groups(cuboid)
    complete, ring = (topologies.build(name, 9) for name in ("complete", "ring"))
    assert len(threes) == len(set(threes)) == 6
    assert shared_groups(ring) == shared_groups(topologies.build("random_matching", 8)) == []
    assert shared_groups(complete.then(ring, after=10**9)) == [everyone]
    assert shared_groups(complete.then(cuboid.every(10**9), after=5)) == [everyone, *threes]
    assert shared_groups(cuboid.then(ring, after=1)) == threes[:3]
    assert shared_groups(cuboid.every(5).then(ring, after=4)) == []


def test_phases_that_need_many_communicators_go_point_to_point_alone() -> None:
    threes = [topologies.Round.from_groups(40, [(0, hop, hop + 20)]) for hop in range(1, 18)]
    everyone = topologies.build("complete", 40)
    few, many = Topology.from_rounds(threes[:15]), Topology.from_rounds(threes[:16])
    assert len(shared_groups(everyone.then(few, after=3))) == 16
    assert shared_groups(everyone.then(many, after=3)) == [tuple(range(40))]
    assert len(shared_groups(many.then(everyone, after=15))) == 16
    assert shared_groups(Topology.from_rounds(threes).then(everyone, after=17)) == [tuple(range(40))]
