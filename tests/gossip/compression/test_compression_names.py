"""Compressions by name: ours, and a user's own."""

import pytest

import gossip
from gossip.compression.compression_names import resolve_compression


def test_a_registered_compression_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip.COMPRESSIONS, "_entries", dict(gossip.COMPRESSIONS._entries))

    @gossip.COMPRESSIONS.register("my_eight_bits")
    def my_eight_bits() -> gossip.Compression:
        return gossip.ModuloQuantization(8, headroom=2.0)

    assert resolve_compression("my_eight_bits").describe() == my_eight_bits().describe()
    with pytest.raises(ValueError, match=r"the compression name 'my_eight_bits' is taken by .*my_eight_bits; choose"):
        gossip.COMPRESSIONS.register("my_eight_bits")(my_eight_bits)
