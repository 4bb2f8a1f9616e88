"""Plain data survive being made text and bytes."""

import math
import mmap
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from gossip.communication.host.available_memory import ShrinkingMemory
from gossip.parameters.digests import bytes_of
from gossip.parameters.serializable_state import deserialize, serialize, to_serializable
from gossip.private_torch import tree_map


def shown(value: Any) -> str:
    """With the types and the order of everything in it, and every byte of a tensor."""
    return repr(
        tree_map(
            lambda leaf: (leaf.dtype, leaf.shape, bytes_of(leaf).tolist()) if torch.is_tensor(leaf) else leaf, value
        )
    )


VALUES = [
    None,
    [True, 0, -(2**70), 1.5, math.inf, math.nan, "ä\n"],
    (1 + 2j, b"\x00\xff", bytearray(b"ab"), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
    {0: "integer key", "0": "text key", (1, 2): {"nested": [()]}},
    OrderedDict(b=1, a=2),
    Counter("aab"),
    {1, 2},
    [torch.zeros(0, 3), torch.tensor(5), torch.tensor([True, False]), torch.ones(3, 2, dtype=torch.bfloat16).t()],
    torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_come_back(value: Any) -> None:
    assert shown(deserialize(*serialize(to_serializable(value, "value")))) == shown(value)


def test_the_copies_are_the_sender_s_own_and_then_the_receiver_s() -> None:
    memory = ShrinkingMemory(6 * mmap.PAGESIZE)
    tensor = torch.ones(mmap.PAGESIZE)
    text, values = serialize([tensor, tensor[:3]], lambda num_bytes: memory.values[:num_bytes])
    tensor.zero_()
    found = deserialize(text, values, memory.release)
    assert memory.num_released == 4 * mmap.PAGESIZE
    values.zero_()
    assert [one.mean().item() for one in found] == [1, 1]
