"""Virtual workers split a batch over the replicas, and gather what they make of it."""

from typing import Any

import pytest
import torch
from separate import batch, make_workers
from torch import nn


class Echo(nn.Module):
    """Gives back what it is called with, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def scaled(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value * self.weight
            if isinstance(value, dict):
                return {key: scaled(each) for key, each in value.items()}
            return tuple(map(scaled, value)) if isinstance(value, tuple) else value

        return scaled((*args, kwargs))


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("num_samples", [1, 5, 8, 11])
@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_come_in_the_order_of_the_samples(dim: int, num_samples: int, world_size: int) -> None:
    inputs = torch.arange(num_samples * 6.0).view(num_samples, 2, 3).transpose(0, dim)
    for num_devices in {1, min(2, world_size), min(3, world_size)}:
        workers = make_workers(Echo(), world_size, dim=dim, devices=["cpu"] * num_devices)
        (found, _) = workers(inputs)
        assert torch.equal(found, inputs)


def test_what_is_nested_is_split_and_gathered() -> None:
    workers = make_workers(Echo(), 3)
    inputs, counts = torch.arange(10.0).view(5, 2), torch.arange(5)
    first, second, rest = workers((inputs, {"a": inputs + 1}), 7, key={"counts": counts, "name": "x"})
    assert torch.equal(first[0], inputs)
    assert torch.equal(first[1]["a"], inputs + 1)
    assert second == 7
    assert torch.equal(rest["key"]["counts"], counts.float())
    assert rest["key"]["name"] == "x"


def test_tensors_without_the_dimension_go_to_all_and_come_back_once_per_replica() -> None:
    workers = make_workers(Echo(), 3)
    inputs, scalar, rest = workers(torch.zeros(5, 2), torch.tensor(2.0))
    assert inputs.shape == (5, 2)
    assert scalar.tolist() == [2.0, 2.0, 2.0]
    assert rest == {}
    _, scalar, _ = workers(torch.zeros(2, 2), torch.tensor(2.0))
    assert scalar.tolist() == [2.0, 2.0], "one entry for each replica that had samples"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (torch.tensor(1.0), "no tensor with a dimension dim=0"),
        ((torch.zeros(2, 1), torch.zeros(3, 1)), r"different lengths \[2, 3\] along dim=0"),
        (torch.zeros(0, 3), "length 0 along dim=0"),
    ],
)
def test_what_is_no_batch_is_refused(inputs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_workers(Echo(), 2)(inputs)


def test_outputs_that_hide_tensors_are_refused() -> None:
    class Box:
        def __init__(self, inside: torch.Tensor) -> None:
            self.inside = inside

    class Boxing(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return Box(super().forward(input))

    workers = make_workers(Boxing(3, 2).double(), 2)
    with pytest.raises(TypeError, match=r"a Box with tensors inside.*tuples, lists and dicts"):
        workers(batch(4))
    assert workers.is_vectorised
