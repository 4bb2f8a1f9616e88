"""What every compression keeps, over every topology that it serves, and the order of an exchange.

What takes many rounds is run by stacked codecs, where there are any: test_stacked_codecs.py holds them to the ranks'.
"""

import itertools
import re
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compressions import COMPRESSIONS, SERVED, TOPOLOGIES, in_turn
from exchanging import Ranks, StackedRanks, View
from tiers import rest_is_slow

import gossip
import topologies
from gossip import Arrival, BucketShape, Codec, Compression, Conversation, Delivery, GossipError, Turn, Turns
from gossip.compression.compression_names import resolve_compression
from gossip.compression.conversation import carry
from gossip.compression.sparse_quantization import SparseQuantization
from topologies import Round, Topology

REFUSED = [
    (name, topology) for name, row in COMPRESSIONS.items() for topology in TOPOLOGIES if topology not in row.topologies
]


def replicas(topology: str, numel: int, dtype: torch.dtype = torch.float32, spread: float = 0.1) -> list[torch.Tensor]:
    """Around common values, as replicas are."""
    generator = torch.Generator().manual_seed(numel)
    common = torch.randn(numel, generator=generator, dtype=torch.float64)
    size = TOPOLOGIES[topology].world_size
    apart = spread * torch.randn(size, numel, generator=generator, dtype=torch.float64)
    return [(common + each).to(dtype) for each in apart]


def make(name: str, topology: str, values: list[torch.Tensor], seed: int = 0) -> Ranks:
    return Ranks(*arguments(name, topology, values, seed))


def arguments(
    name: str, topology: str, values: list[torch.Tensor], seed: int = 0
) -> tuple[Compression, Topology, list[torch.Tensor], Sequence[View] | None]:
    compression = COMPRESSIONS[name].make(seed)
    compression.check(TOPOLOGIES[topology])
    return compression, TOPOLOGIES[topology], values, COMPRESSIONS[name].views(values[0].numel())


@torch.no_grad()  # once for all rounds
@pytest.mark.parametrize(
    ("name", "topology", "numel"),
    rest_is_slow([*((*served, 5000) for served in in_turn(2)), *((name, "ring", 1) for name in COMPRESSIONS)], 16),
)
def test_replicas_left_alone_agree_up_to_the_floor_on_their_mean(name: str, topology: str, numel: int) -> None:
    row = COMPRESSIONS[name]
    ranks = StackedRanks(*arguments(name, topology, replicas(topology, numel)))
    mean, largest = ranks.mean, float(ranks.mean.abs().max())
    every = 3 if topology == "every" else 1
    for step in range(every * row.num_rounds):
        ranks.mix(step)
    assert ranks.distance <= row.floor * largest
    # float32 rounds to the nearest, here up and there down: what is left of it grows like the root of the rounds.
    assert (ranks.mean - mean).abs().max() <= 4 * row.num_rounds**0.5 * 2**-23 * largest


@pytest.mark.parametrize(("name", "topology"), in_turn(3))
def test_mean_is_exact_in_float64(name: str, topology: str) -> None:
    ranks = make(name, topology, replicas(topology, 3000, torch.float64))
    generator = torch.Generator().manual_seed(1)
    mean = ranks.mean
    for step in range(60):
        update = 0.01 * torch.randn(ranks.stacked.shape, generator=generator, dtype=torch.float64)
        ranks.stacked += update  # as training does
        mean += update.mean(0)
        ranks.mix(step)
    # What is mixed in is summed in float32 by some; an error of that order would show.
    assert (ranks.mean - mean).abs().max() <= 1e-13


@pytest.mark.slow
@torch.no_grad()  # once for all
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_no_drift_over_thousands_of_rounds(name: str) -> None:
    row = COMPRESSIONS[name]
    # Three ranks: what two give each other cancels whatever its rounding; and in one direction, where it may be.
    name_of_ring = "directed_ring" if "directed_ring" in row.topologies else "ring"
    ranks = StackedRanks(row.make(0), topologies.build(name_of_ring, 3), replicas("ring", 40)[:3], row.views(40))
    generator = torch.Generator().manual_seed(1)
    drift = torch.zeros(40, dtype=torch.float64)
    distances = []
    for step in range(2500):
        ranks.stacked += 0.01 * torch.randn(ranks.stacked.shape, generator=generator)
        before = ranks.mean
        ranks.mix(step)
        drift += ranks.mean - before
        distances.append(ranks.distance)
    # 2,500 roundings of 1e-7 each, one way, would be 2.5e-4. Where much the same is mixed in again, rounding repeats.
    assert drift.abs().max() <= 1.5e-5
    assert max(distances[2000:]) <= 2 * max(distances[500:1000])


@pytest.mark.parametrize(("name", "topology"), SERVED)
def test_all_who_read_a_message_decode_it_alike(name: str, topology: str) -> None:
    ranks = make(name, topology, replicas(topology, 5000, torch.float64))
    for step in range(12):
        differences = ranks.exchange(step)
        messages = [codec.sent for codec in ranks.codecs]
        for rank, difference in enumerate(differences):
            if difference is None or any(message is None for message in messages):
                continue
            weights = TOPOLOGIES[topology].round(step).neighbours(rank)
            expected = sum(
                weight * (messages[source].double() - messages[rank].double()) for source, weight in weights.items()
            )
            torch.testing.assert_close(difference, expected, rtol=0, atol=1e-14)
            ranks.values[rank] += difference


@pytest.mark.parametrize(("name", "topology"), in_turn(3))
@pytest.mark.parametrize("saved_after", [1, 7])
def test_state_is_a_copy_that_goes_on_bit_for_bit(name: str, topology: str, saved_after: int) -> None:
    straight = make(name, topology, replicas(topology, 300))
    for step in range(saved_after):
        straight.mix(step)
    resumed = make(name, topology, straight.values)
    states = [codec.state_dict() for codec in straight.codecs]
    for step in range(saved_after, saved_after + 5):
        straight.mix(step)
    for codec, state in zip(resumed.codecs, states, strict=True):
        codec.load_state_dict(state)
    for step in range(saved_after, saved_after + 5):
        resumed.mix(step)
    assert all(torch.equal(one, other) for one, other in zip(straight.values, resumed.values, strict=True))


@pytest.mark.parametrize("name", [name for name, row in COMPRESSIONS.items() if row.is_random])
def test_random_numbers_come_from_seed_step_bucket_and_rank_alone(name: str) -> None:
    topology = COMPRESSIONS[name].topologies[0]

    def run(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 17)  # the global generator must not matter
        ranks = make(name, topology, replicas(topology, 300), seed)
        for step in range(5):
            ranks.mix(step)
        return ranks.values

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_mixed_in_its_dtype_of_accumulation(name: str, dtype: torch.dtype) -> None:
    topology = COMPRESSIONS[name].topologies[0]
    ranks = make(name, topology, replicas(topology, 100, dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before = ranks.distance
    for step in range(30):
        differences = ranks.exchange(step)
        for values, difference in zip(ranks.values, differences, strict=True):
            if difference is not None:
                assert difference.dtype == wide
                assert difference.shape == values.shape
                values.copy_(values.to(wide) + difference)
    assert ranks.distance < before


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_messages_are_as_small_as_promised(name: str) -> None:
    row = COMPRESSIONS[name]
    numel = 2**18
    ranks = make(name, "ring", replicas("ring", numel))
    for step in range(12):
        ranks.mix(step)
        torch.manual_seed(step)
        for values in ranks.values:
            values += 0.001 * torch.randn(numel)
    per_message = ranks.num_bytes / (2 * len(ranks.values))
    assert per_message <= row.bytes_per_value * numel


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_seen_by_sender_and_readers(name: str, bad: float) -> None:
    topology = COMPRESSIONS[name].topologies[0]
    ranks = make(name, topology, replicas(topology, 100))
    for step in range(3):
        ranks.mix(step)
    ranks.values[0][5] = bad
    ours = ranks.exchange(3)[0]
    assert ours is not None
    who = {rank for rank, is_finite in ranks.are_finite.items() if not is_finite}
    assert who - {0} == set(TOPOLOGIES[topology].round(3).targets(0))
    assert 0 in who or not bool(ours.isfinite().all())


@pytest.mark.parametrize(("name", "topology"), REFUSED)
def test_a_topology_that_is_not_served_is_refused_with_the_reason(name: str, topology: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(TOPOLOGIES[topology].name)}.*choose"):
        COMPRESSIONS[name].make(0).check(TOPOLOGIES[topology])


def test_table_has_every_compression_that_has_a_name() -> None:
    assert set(gossip.COMPRESSIONS.available()) <= set(COMPRESSIONS)
    for name, other in itertools.combinations(COMPRESSIONS, 2):
        assert COMPRESSIONS[name].make(0).describe() != COMPRESSIONS[other].make(0).describe()


# ---------------------------------------------------------------------- names, and constants that cannot work


def test_a_registered_compression_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip.COMPRESSIONS, "_entries", dict(gossip.COMPRESSIONS._entries))

    @gossip.COMPRESSIONS.register("my_eight_bits")
    def my_eight_bits() -> gossip.Compression:
        return gossip.ModuloQuantization(8, headroom=2.0)

    assert resolve_compression("my_eight_bits").describe() == my_eight_bits().describe()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: resolve_compression("int7"),
            r"unknown compression 'int7'\. Did you mean 'int8'\? Available: bf16, cho",
        ),
        (lambda: resolve_compression(torch.bfloat16), "must be a name or a gossip.Compression, got torch.bfloat16"),
        (lambda: gossip.Cast("bfloat8"), "dtype must be torch.bfloat16 or torch.float16.*got 'bfloat8'"),
        (lambda: gossip.Choco(sparsifier="top"), "'top'; choose one of top_k, random_k, sign"),
        (lambda: gossip.Choco(gamma=float("nan")), "gamma must be above 0 and at most 1"),
        (lambda: gossip.ModuloQuantization(5), "bits must be 4 or 8, got 5"),
        (lambda: gossip.ModuloQuantization(headroom=0.5), "headroom must be at least 1 and finite, got 0.5"),
        (lambda: gossip.ModuloQuantization(seed=1.5), "seed must be an integer of at least 0, got 1.5"),
        (lambda: gossip.PowerGossip(0), "rank must be at least 1, got 0"),
        (lambda: SparseQuantization(bits=3), "bits must be 2, 4 or 8, got 3"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def test_values_beyond_float16_are_sent_as_its_largest_and_infinity_as_itself() -> None:
    messages = gossip.Cast("float16").messages(torch.tensor([1e5, -1e5, 1.0, torch.inf]))
    assert messages.tolist() == [65504, -65504, 1, torch.inf]


PAIR = topologies.build("complete", 2).round(0)


class Counting(Codec):
    """Sends how often it has sent, as many times as it was told to."""

    def __init__(self, rank: int, num_turns: int = 3, numel: int = 4) -> None:
        self.peer = 1 - rank
        self.num_turns = num_turns
        self.numel = numel

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:  # noqa: ARG002
        for number in range(self.num_turns):
            message = torch.full((self.numel,), float(number))
            yield Turn({self.peer: message}, lambda: {self.peer: torch.empty(4)})
        return Arrival.of(torch.zeros(4))


def conversations(*codecs: Codec) -> dict[int, Conversation]:
    return {rank: codec.exchange(torch.ones(4), PAIR, 0) for rank, codec in enumerate(codecs)}


def test_nothing_has_arrived_before_everything_is_delivered() -> None:
    conversation = Counting(0).exchange(torch.ones(4), PAIR, 0)
    with pytest.raises(GossipError, match=r"has not ended: deliver its messages, and run conversation.proceed"):
        conversation.arrival  # noqa: B018
    turns = conversation.proceed(Delivery(conversation.opening.sent, conversation.opening.receive_buffers))
    next(turns)
    with pytest.raises(GossipError, match="has not ended"):
        conversation.arrival  # noqa: B018


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Counting(1, num_turns=2), "rank 0 sends rank 1 a message that it does not expect: a codec's turns"),
        (Counting(1, numel=5), r"rank 1 sends rank 0 \(5,\) of torch.float32, which expects \(4,\) of torch.float32"),
    ],
)
def test_ends_of_an_edge_that_differ_are_named(other: Codec, text: str) -> None:
    with pytest.raises(GossipError, match=text):
        carry(conversations(Counting(0), other))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_values_are_not_kept_while_their_message_is_under_way(name: str) -> None:
    values = torch.randn(300)
    codec = COMPRESSIONS[name].make(0).codec(BucketShape(0, values, COMPRESSIONS[name].views(300)), 0)
    gone = weakref.ref(values)
    conversation = codec.exchange(values, PAIR, 0)
    del values
    assert gone() is None
    assert conversation.opening.sent
