"""How parameters are packed into blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossip.parameters.buckets import make_buckets


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(shapes)]


def test_buckets_fill_in_reverse_order_up_to_the_cap() -> None:
    parameters = parameters_of((4,), (4,), (4,), (100,), (4,))
    names = [bucket.names for bucket in make_buckets(parameters, cap_bytes=32)]
    assert names == [("p4",), ("p3",), ("p2", "p1"), ("p0",)]


def test_dtypes_have_buckets_of_their_own() -> None:
    parameters = [
        *((f"single{i}", parameter) for i, (_, parameter) in enumerate(parameters_of((4,), (4,)))),
        *((f"double{i}", parameter) for i, (_, parameter) in enumerate(parameters_of((4,), dtype=torch.float64))),
        *((f"half{i}", parameter) for i, (_, parameter) in enumerate(parameters_of((4,), dtype=torch.bfloat16))),
    ]
    buckets = make_buckets(parameters, cap_bytes=10**6, first_index=5)
    assert [bucket.names for bucket in buckets] == [("half0",), ("double0",), ("single1", "single0")]
    assert [bucket.index for bucket in buckets] == [5, 6, 7]
    assert [bucket.block.dtype for bucket in buckets] == [torch.bfloat16, torch.float64, torch.float32]


def test_write_to_the_block_is_seen_by_autograd() -> None:
    parameter = nn.Parameter(torch.ones(3))
    (bucket,) = make_buckets([("p", parameter)], cap_bytes=100)
    loss = (parameter * parameter).sum()
    bucket.block.add_(1)
    bucket.written()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
