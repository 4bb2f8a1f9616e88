"""CHOCO: the recursion of the paper, and its first exchange."""

import numpy as np
import pytest
import torch
from exchanging import Ranks

import topologies
from gossip import BucketShape, Choco
from gossip.compression.sparsifiers import RandomK

NUMEL = 4096 + 133


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
def test_replicas_follow_the_recursion_of_the_paper(name: str, sparsifier: str) -> None:
    topology = topologies.build(name, 5)
    generator = np.random.default_rng(0)
    x = generator.normal(size=NUMEL) + 0.1 * generator.normal(size=(5, NUMEL))
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
