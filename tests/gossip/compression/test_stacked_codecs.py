"""What codecs of all ranks at once make is what each rank's own codec makes, bit for bit."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from compressions import COMPRESSIONS, SERVED, TOPOLOGIES
from covering import covering
from replicas import assert_equal_states

import topologies
from gossip import BucketShape, Compression, GossipError
from gossip.compression.choco import StackedChocoCodec
from gossip.compression.codec import StackedArrival, StackedCodec
from gossip.virtual.stacked_exchanges import RankCodecs
from topologies import Round, Topology

STACKED = ("int8", "int4", "choco", "choco random_k", "choco sign")


def uneven(edges: dict[int, tuple[int, ...]]) -> Topology:
    """Of seven ranks, who read these; each edge has a weight of its own, the same in both directions."""
    matrix = np.zeros((7, 7))
    for reader, sources in edges.items():
        for source in sources:
            matrix[reader, source] = 0.05 + 0.01 * (reader + source) + 0.003 * abs(reader - source)
    round_ = Round.from_matrix(matrix + np.diag(1 - matrix.sum(1)))
    return Topology.from_rounds([round_], stochasticity="row", name="uneven")


# Rank 4 only sends, 3 and 5 only read, and 6 does neither.
DIRECTED = uneven({0: (1, 2, 4), 1: (0, 2), 2: (0, 1, 4), 3: (1,), 5: (0, 2, 4)})
# Two ranks each have one, two and three peers, and rank 4 has none.
UNDIRECTED = uneven({0: (1,), 1: (0, 2), 2: (1, 3, 5), 3: (2, 5), 5: (2, 3, 6), 6: (5,)})
SEVERAL = {name: TOPOLOGIES[name] for name in ("ring", "directed_ring", "star", "random_matching", "every", "then")}
CASES = [  # each codec, and each topology with one of them
    *((name, topology) for name, topology in SERVED if name in ("int8", "choco") and topology in SEVERAL),
    *((name, "star") for name in ("int4", "choco random_k", "choco sign")),
]


class Both:
    """The same replicas twice: mixed by their own codecs, and all at once."""

    def __init__(
        self,
        compression: Compression,
        topology: Topology,
        numel: int,
        dtype: torch.dtype,
        *,
        begins_together: bool = False,
    ) -> None:
        self.compression, self.topology = compression, topology
        self.generator = torch.Generator().manual_seed(numel)
        common = torch.randn(numel, generator=self.generator)
        self.start = common.to(dtype) if begins_together else None
        apart = 0.1 * torch.randn(topology.world_size, numel, generator=self.generator)
        self.values = [(common + apart).to(dtype) for _ in range(2)]
        self.codecs = self.make()

    def make(self) -> tuple[StackedCodec, StackedCodec]:
        bucket, size = BucketShape(2, self.values[0][0], start=self.start), self.topology.world_size
        stacked = self.compression.stacked_codec(bucket, size)
        return RankCodecs([self.compression.codec(bucket, rank) for rank in range(size)]), stacked

    def exchange(self, step: int) -> tuple[StackedArrival, StackedArrival]:
        round_ = self.topology.round(step)
        one, other = (
            codec.exchange([values], round_, step) for codec, values in zip(self.codecs, self.values, strict=True)
        )
        return one, other

    def mix(self, step: int) -> None:
        """A step of training, a round, and a look at all that comes of it."""
        update = 0.01 * torch.randn(self.values[0].shape, generator=self.generator)
        for values in self.values:
            values += update.to(values.dtype)
        if self.topology.round(step).is_identity:
            return
        one, other = self.exchange(step)
        assert one.num_bytes == other.num_bytes
        assert_same_bits(one.differences[0], other.differences[0])
        assert_same_bits(one.sent[0], other.sent[0])
        for values, arrival in zip(self.values, (one, other), strict=True):
            values += arrival.differences[0].to(values.dtype)
        assert_equal_states(*self.states())

    def states(self) -> list[list[dict[str, Any]]]:
        return [[codec.state_dict(rank) for rank in range(self.topology.world_size)] for codec in self.codecs]


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    assert torch.equal(one, other)
    assert torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize(
    ("numel", "dtype"), [(1, torch.float32), (5000, torch.float32), (40, torch.float64), (40, torch.bfloat16)]
)
@pytest.mark.parametrize("name", STACKED)
def test_messages_differences_bytes_and_states_are_those_of_each_rank(
    name: str, dtype: torch.dtype, numel: int
) -> None:
    for topology in SEVERAL:
        if topology not in COMPRESSIONS[name].topologies:
            continue
        both = Both(COMPRESSIONS[name].make(3), SEVERAL[topology], numel, dtype)
        for step in range(10):
            if step == 6:  # some do not fit their code any more
                for values in both.values:
                    values[0, : -(-numel // 2)] += 100
            if step == 8:  # and some are not to be had on a lattice
                for values in both.values:
                    values[-1, 0] = 5e4
            both.mix(step)


@pytest.mark.parametrize(
    ("name", "topology", "silent", "idle"),
    [*((name, UNDIRECTED, [4], 4) for name in STACKED), *((name, DIRECTED, [4, 6], 6) for name in ("int8", "int4"))],
)
def test_ranks_with_few_peers_or_none_are_as_by_themselves(
    name: str, topology: Topology, silent: list[int], idle: int
) -> None:
    both = Both(COMPRESSIONS[name].make(3), topology, 300, torch.float32)
    for step in range(8):
        both.mix(step)
    _, arrival = both.exchange(8)
    assert (~arrival.differences[0].any(1)).nonzero().flatten().tolist() == silent
    assert torch.equal(arrival.sent[0][idle], both.values[1][idle])


@pytest.mark.parametrize(
    ("name", "dtype", "numel", "saved_at"),
    covering(itertools.product(STACKED, (torch.float32, torch.bfloat16), (300, 5000), (0, 1, 2))),
)
def test_ranks_that_began_together_go_on_from_each_others_states(
    name: str, dtype: torch.dtype, numel: int, saved_at: int
) -> None:
    is_lattice = name.startswith("int")
    topology = topologies.build("random_matching" if is_lattice else "ring", 7)  # of the former somebody is left over
    both = Both(COMPRESSIONS[name].make(3), topology, numel, dtype, begins_together=is_lattice)
    for step in range(5):
        if step == saved_at:
            of_ranks, of_stack = both.states()
            both.start = None
            both.codecs = both.make()
            both.codecs[0].load_state_dicts(of_stack)
            both.codecs[1].load_state_dicts(of_ranks)
            assert sum("start" in state for state in of_stack) == (7, 1, 0)[saved_at] * is_lattice
        both.mix(step)


def test_choco_refuses_ranks_of_which_some_have_not_begun() -> None:
    both = Both(COMPRESSIONS["choco"].make(0), UNDIRECTED, 300, torch.float32)
    both.mix(0)
    ring = topologies.build("ring", 7).round(1)
    with pytest.raises(GossipError, match="rank 0 has exchanged with its peers before, but rank 4 has not"):
        both.codecs[1].exchange([both.values[1]], ring, 1)


@pytest.mark.parametrize(("name", "topology"), CASES)
@pytest.mark.parametrize(("bad", "bad_step"), [(float("nan"), 0), (float("inf"), 3)])
def test_what_is_not_finite_is_seen_by_the_same_ranks(name: str, topology: str, bad: float, bad_step: int) -> None:
    both = Both(COMPRESSIONS[name].make(3), SEVERAL[topology], 100, torch.float32)
    for step in range(bad_step):
        both.mix(step)
    before = [values[0].clone() for values in both.values]
    for values in both.values:
        values[0, 5] = bad
    one, other = (arrival.differences[0].isfinite().all(1) for arrival in both.exchange(bad_step))
    assert torch.equal(one, other)
    targets = SEVERAL[topology].round(bad_step).targets(0)
    assert set((~one).nonzero().flatten().tolist()) == ({0, *targets} if targets else set())
    assert_equal_states(*both.states())
    for values, good in zip(both.values, before, strict=True):
        values[0] = good
    for step in range(bad_step + 1, bad_step + 4):
        both.mix(step)
    assert all(arrival.differences[0].isfinite().all() for arrival in both.exchange(bad_step + 4))
    if isinstance(stacked := both.codecs[1], StackedChocoCodec):
        assert stacked.total.sum(0).abs().max() <= 1e-14
