"""What ranks measure that links carry is theirs alone, though an interface counts for all of its ranks."""

from __future__ import annotations

from unittest import mock

import pytest
from ranks import run_ranks

from gossip.lab.benchmarks import goodput


def measure_on_an_interface_that_sends_12_bytes_per_s(shared: bool) -> float | None:
    with mock.patch.object(goodput, "_exchange", return_value=12.0):
        return goodput.measure(address="127.0.0.1", interface="lo", shared=shared, timeout_s=60)


@pytest.mark.parametrize(
    ("shared", "world_size", "expected"),
    [(False, 2, [12.0, 12.0]), (True, 2, [6.0, 6.0]), (True, 3, [6.0, 6.0, None]), (True, 4, [3.0, 3.0, 3.0, 3.0])],
)
def test_shared_interface_is_divided_among_the_ranks_that_send(
    shared: bool, world_size: int, expected: list[float | None]
) -> None:
    measured = run_ranks(measure_on_an_interface_that_sends_12_bytes_per_s, shared, world_size=world_size)
    assert measured == expected
