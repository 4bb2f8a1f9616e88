"""Modulo quantization: what fits its code, what does not, and how it finds its lattice."""

import pytest
import torch
from exchanging import Ranks
from live_memory import LiveBytes

from gossip import ModuloQuantization
from gossip.compression import lattice
from gossip.compression.codec import BucketShape
from gossip.compression.conversation import CHUNK_NUMEL
from gossip.compression.modulo import ModuloArithmetic
from topologies import build

NUM_BLOCKS = 5
NUMEL = NUM_BLOCKS * lattice.BLOCK_NUMEL - 100
BITS = (8, 4)


def settled(bits: int) -> Ranks:
    """Two replicas that have exchanged for a while, and are a little apart."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(NUMEL, generator=generator)] * 2
    ranks = Ranks(ModuloQuantization(bits), build("complete", 2), values)
    for step in range(20):
        move(ranks, generator)
        ranks.mix(step)
    move(ranks, generator)
    return ranks


def move(ranks: Ranks, generator: torch.Generator) -> None:
    for values in ranks.values:
        values += 1e-3 * torch.randn(NUMEL, generator=generator)


def num_resent(ranks: Ranks) -> list[int]:
    return [codec.num_resent for codec in ranks.codecs]


def test_the_first_lattice_is_found_with_memory_for_a_part_of_the_bucket() -> None:
    start = torch.zeros(8 * CHUNK_NUMEL + 5)
    arithmetic, values = ModuloArithmetic(ModuloQuantization(), BucketShape(0, start, None, start=start)), start + 1
    with LiveBytes() as memory:
        arithmetic.first_levels(values, start)
    assert 0 < memory.peak < start.nbytes / 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_from_a_common_start_the_first_exchange_fits_however_far_ranks_have_come(bits: int, is_resumed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator)
    ranks = Ranks(ModuloQuantization(bits), build("complete", 4), [start] * 4, start=start)
    scales = 10.0 ** -torch.arange(NUM_BLOCKS).repeat_interleave(lattice.BLOCK_NUMEL)[:NUMEL]
    for values in ranks.values:
        values += scales * torch.randn(NUMEL, generator=generator)
    if is_resumed:
        states = [codec.state_dict() for codec in ranks.codecs]
        ranks = Ranks(ModuloQuantization(bits), build("complete", 4), ranks.values)
        for codec, state in zip(ranks.codecs, states, strict=True):
            codec.load_state_dict(state)
            assert torch.equal(state["start"], start)
    largest = 2 * ((ranks.stacked - start) / scales).abs().max()
    mean = ranks.mean
    ranks.mix(0)
    assert num_resent(ranks) == [0] * 4
    # Rounding moves a value by one lattice constant at most, which is less than two times that of its level.
    assert (ranks.mean - mean).abs().max() <= 1e-6
    noise = (ranks.stacked - mean).abs() - 1e-6
    assert (noise / scales).max() <= 2 * 2 * 1.5 * largest / 2**bits
    assert all("start" not in codec.state_dict() for codec in ranks.codecs)


@pytest.mark.parametrize("bits", BITS)
def test_from_a_common_start_the_first_exchange_with_every_peer_fits(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator)
    ranks = Ranks(ModuloQuantization(bits), build("one_peer_exponential", 8), [start] * 8, start=start)
    for step in range(6):
        for values in ranks.values:
            values += 1e-3 * torch.randn(NUMEL, generator=generator).sign()  # as Adam's first updates
        ranks.mix(step)
    assert num_resent(ranks) == [0] * 8


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("places", [[7], [7, 8], [5000], [3, 4 * lattice.BLOCK_NUMEL + 1]])
def test_values_too_far_apart_are_noticed_and_sent_in_full(bits: int, places: list[int]) -> None:
    ranks = settled(bits)
    before = num_resent(ranks)
    # So that what the code says is wrong, and as small as if it were right; two of them in opposite directions.
    step_size = 2.0 ** lattice.exponents(ranks.codecs[0].levels)
    for number, place in enumerate(places):
        period = 2**bits * float(step_size[place // lattice.BLOCK_NUMEL])
        ranks.values[1][place] += period if number % 2 == 0 else -period
    apart = ranks.values[1] - ranks.values[0]
    first, second = ranks.exchange(20)
    num_blocks = len({place // lattice.BLOCK_NUMEL for place in places})
    assert num_resent(ranks) == [count + num_blocks for count in before]
    assert torch.equal(first, -second)
    for place in places:
        size = float(step_size[place // lattice.BLOCK_NUMEL])
        assert abs(2 * first[place] - apart[place]) <= 2 * size

    for values, difference in zip(ranks.values, (first, second), strict=True):
        values += difference
    ranks.values[1][places] += apart[places]  # as far again: now it fits
    ranks.exchange(21)
    assert num_resent(ranks) == [count + num_blocks for count in before]


@pytest.mark.parametrize("bits", BITS)
def test_the_lattice_follows_the_differences_both_ways(bits: int) -> None:
    ranks = settled(bits)
    usual = ranks.codecs[0].levels.clone()
    ranks.values[1] += 1.0
    ranks.mix(20)
    assert bool((ranks.codecs[0].levels > usual + 5 * lattice.LEVELS_PER_OCTAVE).all())
    assert torch.equal(ranks.codecs[0].levels, ranks.codecs[1].levels)
    generator = torch.Generator().manual_seed(1)
    for step in range(21, 150):
        move(ranks, generator)
        ranks.mix(step)
    assert bool((ranks.codecs[0].levels <= usual + lattice.LEVELS_PER_OCTAVE).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shift", [1, 3, 9, 40])
def test_ranks_on_different_lattices_understand_each_other(bits: int, shift: int) -> None:
    ranks = settled(bits)
    levels = ranks.codecs[1].levels
    levels[1:4] += shift * lattice.LEVELS_PER_OCTAVE
    first, second = ranks.exchange(20)
    points = [codec.sent for codec in ranks.codecs]
    torch.testing.assert_close(first, (points[1] - points[0]) / 2, rtol=0, atol=0)
    assert torch.equal(first, -second)


def test_rounding_is_right_in_the_mean() -> None:
    compression = ModuloQuantization(8)
    values = torch.linspace(-1, 1, 1000)
    ranks = Ranks(compression, build("complete", 2), [values, values + 0.3])
    ranks.mix(0)
    total = torch.zeros_like(values, dtype=torch.float64)
    num_draws = 4000
    codec, round_ = ranks.codecs[0], build("complete", 2).round(0)
    for step in range(num_draws):
        codec.exchange(values, round_, step)
        total += codec.sent.double()
    size = 2.0 ** float(lattice.exponents(ranks.codecs[0].levels)[0])
    # The standard error of the mean of numbers that are spread over less than one step.
    assert (total / num_draws - values).abs().max() <= 5 * size / 2 / num_draws**0.5
