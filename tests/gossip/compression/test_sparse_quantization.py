"""Messages of the largest values in a few bits, against their definition in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch
from covering import covering

import topologies
from gossip import BucketShape
from gossip.compression.conversation import carry
from gossip.compression.sparse_quantization import SparseQuantization


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
