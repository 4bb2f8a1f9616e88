"""PowerGossip: the algorithm of the paper edge by edge, strided and narrow parameters."""

import numpy as np
import pytest
import torch
from exchanging import Ranks

import topologies
from gossip import BucketShape, Delivery, PowerGossip
from gossip.compression.powergossip import _orthonormal

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
