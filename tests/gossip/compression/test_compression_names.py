"""Compressions by name, ours and a user's own, and constants that cannot work."""

from typing import Any

import pytest
import torch

import gossip
from gossip.compression.compression_names import resolve_compression
from gossip.compression.sparse_quantization import SparseQuantization


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
