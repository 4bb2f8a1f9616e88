"""Messages of the largest values in a few bits, against their definition in numpy."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from covering import covering
from torch import nn

import topologies
from gossip import BucketShape, VirtualWorkers
from gossip.algorithms import SparseLoCo
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


def test_zeros_are_sent_as_zeros_and_what_is_not_finite_is_seen() -> None:
    topology = topologies.build("complete", 2)
    for spoilt in (0.0, math.nan, math.inf):
        values = torch.zeros(2, 10)
        values[1, 3] = spoilt
        codecs = [SparseQuantization(0.2, 2).codec(BucketShape(0, row), rank) for rank, row in enumerate(values)]
        conversations = {rank: codec.exchange(values[rank], topology.round(0), 0) for rank, codec in enumerate(codecs)}
        carry(conversations)
        assert conversations[0].arrival.is_finite == math.isfinite(spoilt)
        if not spoilt:
            assert all(not part.any() for _, part in conversations[0].arrival.parts)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ratio": 0}, "ratio must be a number above 0 and at most 1, got 0"),
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SparseLoCo(**arguments)  # type: ignore[arg-type]


def test_a_compression_beside_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"encodes its messages itself, .* compression bf16; choose compression=None"):
        VirtualWorkers(
            nn.Linear(2, 1),
            3,
            partial(torch.optim.SGD, lr=0.1),
            "complete",
            algorithm="sparse_loco",
            compression="bf16",
            devices=["cpu"],
        )
