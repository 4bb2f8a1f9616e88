"""PowerGossip, CHOCO and messages of the largest values in a few bits, each against its definition in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch
from covering import covering
from exchanging import Ranks

import topologies
from gossip import BucketShape, Choco, Delivery, PowerGossip
from gossip.compression.conversation import carry
from gossip.compression.powergossip import _orthonormal
from gossip.compression.sparse_quantization import SparseQuantization
from gossip.compression.sparsifiers import RandomK

#: A matrix, a vector, a convolution's weight in channels_last, a transposed matrix, and one too narrow to gain.
VIEWS = [
    ((6, 9), (9, 1), 0),
    ((5,), (1,), 56),
    ((4, 3, 2, 2), (12, 1, 6, 3), 64),
    ((7, 8), (1, 7), 112),
    ((1, 12), (12, 1), 168),
]
NUMEL = 180


def replicas(num_ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator, dtype=torch.float64) for _ in range(num_ranks)]


@pytest.mark.parametrize("num_vectors", [1, 2])
def test_replicas_follow_the_algorithm_of_the_paper(num_vectors: int) -> None:
    """Algorithm 1, in which each edge sees both matrices; here of one matrix, on a ring of four."""
    topology = topologies.build("ring", 4)
    weights = topology.round(0).matrix()
    generator = np.random.default_rng(0)
    matrices = generator.normal(size=(4, 6, 9))
    ranks = Ranks(
        PowerGossip(num_vectors), topology, [torch.from_numpy(each.reshape(-1)) for each in matrices], VIEWS[:1]
    )
    directions: dict[tuple[int, int], np.ndarray] = {}
    for step in range(30):
        if step == 1:  # from the directions on that were drawn for the first exchange, and what it made of them
            for low, high in ((0, 1), (1, 2), (2, 3), (0, 3)):
                lower, higher = ranks.codecs[low], ranks.codecs[high]
                assert torch.equal(lower.directions[high][0], higher.directions[low][0])
                directions[low, high] = lower.directions[high][0].numpy().copy()
            matrices = torch.stack(ranks.values).numpy().reshape(4, 6, 9).copy()
        ranks.mix(step)
        if not directions:
            continue
        new = matrices.copy()
        for (low, high), vectors in directions.items():
            difference = matrices[high] - matrices[low]
            if step % 2 == 0:
                product = difference @ vectors
                change = weights[low, high] * product @ vectors.T
            else:
                product = difference.T @ vectors
                change = weights[low, high] * vectors @ product.T
            new[low] += change
            new[high] -= change
            orthonormal, triangle = np.linalg.qr(product)
            directions[low, high] = orthonormal * np.sign(np.diag(triangle))
        matrices = new
        np.testing.assert_allclose(torch.stack(ranks.values).numpy().reshape(4, 6, 9), matrices, rtol=0, atol=1e-10)
    assert np.ptp(matrices, axis=0).max() > 1e-6


def test_messages_hold_vectors_and_what_gains_nothing() -> None:
    codec = PowerGossip(1).codec(BucketShape(0, replicas(1)[0], VIEWS), 0)
    round_ = topologies.build("complete", 2).round(0)
    outside = NUMEL - 6 * 9 - 4 * 12 - 7 * 8
    sizes = []
    for step in range(2):
        conversation = codec.exchange(replicas(1)[0], round_, step)
        sent = conversation.opening.sent
        (message,) = sent.values()
        assert list(conversation.proceed(Delivery(sent, {1: message.clone()}))) == []
        sizes.append(message.numel())
    assert sizes == [outside + 6 + 4 + 7, outside + 9 + 12 + 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_that_say_nothing_are_replaced(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    good, fallback = (torch.randn(9, 1, generator=generator, dtype=dtype) for _ in range(2))
    fallbacks = torch.cat([fallback, fallback + 1, fallback * good], dim=1)
    for bad in (torch.zeros_like(good), 3 * good, torch.full_like(good, torch.nan), torch.full_like(good, torch.inf)):
        found = _orthonormal(torch.cat([good, bad, 1e-30 * (good + 1)], dim=1), lambda: [fallbacks], 0)
        torch.testing.assert_close(found.T @ found, torch.eye(3, dtype=dtype), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[:, :1], good / good.norm())


NUM_VALUES = 4096 + 133


def kept_by_top_k(difference: np.ndarray, ratio: float) -> np.ndarray:
    kept = np.zeros_like(difference)
    for start in range(0, len(difference), 4096):
        block = difference[start : start + 4096]
        largest = np.argsort(-np.abs(block))[: int(np.ceil(ratio * len(block)))]
        kept[start + largest] = block[largest]
    return kept


def kept_by_sign(difference: np.ndarray) -> np.ndarray:
    blocks = [difference[start : start + 32] for start in range(0, len(difference), 32)]
    return np.concatenate([np.abs(block).mean() * np.where(block < 0, -1, 1) for block in blocks])


def kept_by_random_k(difference: np.ndarray, ratio: float, step: int) -> np.ndarray:
    sparsifier = RandomK(BucketShape(0, torch.from_numpy(difference)), ratio, 0)
    sparsifier.begin(step)
    payload = torch.empty(sparsifier.num_bytes, dtype=torch.uint8)
    known = torch.zeros(len(difference), dtype=torch.float64)
    sparsifier.encode_(torch.from_numpy(difference), known, payload)
    return known.numpy()


@pytest.mark.parametrize("sparsifier", ["top_k", "random_k", "sign"])
@pytest.mark.parametrize("name", ["ring", "star"])
def test_choco_follows_the_recursion_of_the_paper(name: str, sparsifier: str) -> None:
    topology = topologies.build(name, 5)
    generator = np.random.default_rng(0)
    x = generator.normal(size=NUM_VALUES) + 0.1 * generator.normal(size=(5, NUM_VALUES))
    ranks = Ranks(Choco(sparsifier=sparsifier, ratio=1 / 8, gamma=0.1), topology, [torch.from_numpy(row) for row in x])
    # Algorithm 1, with a copy of everybody: x_hat += C(x - x_hat), x += gamma (W - I) x_hat.
    public, mixing = np.zeros_like(x), topology.round(0).matrix() - np.eye(5)
    for step in range(40):
        updates = 0.01 * generator.normal(size=x.shape)
        x += updates
        for rank, difference in enumerate(x - public):
            if step == 0:
                public[rank] += difference
            elif sparsifier == "top_k":
                public[rank] += kept_by_top_k(difference, 1 / 8)
            elif sparsifier == "sign":
                public[rank] += kept_by_sign(difference)
            else:
                public[rank] += kept_by_random_k(difference, 1 / 8, step)
        x += 0.1 * mixing @ public
        for values, update in zip(ranks.values, updates, strict=True):
            values += torch.from_numpy(update)
        ranks.mix(step)
    assert np.ptp(x, axis=0).max() > 1e-3
    np.testing.assert_allclose(torch.stack(ranks.values).numpy(), x, rtol=0, atol=1e-12)


def expected(values: np.ndarray, ratio: float, bits: int) -> np.ndarray:
    """What is decoded of one block."""
    kept = np.argsort(-np.abs(values))[: math.ceil(ratio * len(values))]
    scale = np.abs(values).max()
    points = np.minimum(np.floor((values[kept] / scale + 1) * 2 ** (bits - 1)), 2**bits - 1)
    found = np.zeros(len(values))
    found[kept] = ((points + 0.5) / 2 ** (bits - 1) - 1) * scale
    return found


@pytest.mark.parametrize(
    ("numel", "bits", "dtype"),
    covering(itertools.product((1, 3, 4096, 3 * 4096 + 5), (2, 4, 8), (torch.float32, torch.float64))),
)
def test_messages_are_those_of_the_definition(numel: int, bits: int, dtype: torch.dtype) -> None:
    topology, ratio = topologies.build("complete", 3), 1 / 16
    values = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel + bits)).to(dtype)
    codecs = [SparseQuantization(ratio, bits).codec(BucketShape(0, row), rank) for rank, row in enumerate(values)]
    conversations = {rank: codec.exchange(values[rank], topology.round(0), 0) for rank, codec in enumerate(codecs)}
    num_bytes = carry(conversations)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = [(start, min(start + 4096, numel)) for start in range(0, numel, 4096)]
    full, kept = numel // 4096, [math.ceil(ratio * (stop - start)) for start, stop in blocks]
    parts = [sum(kept[:full]), *kept[full:]]  # the full blocks' points are packed together
    one = len(blocks) * wide.itemsize + 2 * sum(kept) + sum(-(-number * bits // 8) for number in parts)
    assert num_bytes == 6 * one
    wanted = np.stack(
        [
            np.concatenate([expected(row[start:stop], ratio, bits) for start, stop in blocks])
            for row in values.to(wide).numpy()
        ]
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for rank, codec in enumerate(codecs):
        np.testing.assert_allclose(codec.sent, wanted[rank], rtol=0, atol=tolerance)
        found = np.zeros(numel)
        for place, part in conversations[rank].arrival.parts:
            found[place] = part
        np.testing.assert_allclose(found, wanted.mean(0) - wanted[rank], rtol=0, atol=tolerance)
