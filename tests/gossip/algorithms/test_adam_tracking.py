"""AdamTracking: what it refuses, and whose second moment it divides by; its recursion is in the contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from gossip import GossipDataParallel


@pytest.mark.parametrize(
    ("make", "dtype", "text"),
    [
        (torch.optim.SGD, torch.float32, r"of torch.optim.Adam and AdamW, but the optimizer is torch.optim.sgd.SGD"),
        (partial(torch.optim.AdamW, amsgrad=True), torch.float32, "amsgrad=True would keep the maximum; pass amsgrad="),
        (partial(torch.optim.Adam, betas=(0.9, 0.0)), torch.float32, r"betas\[1\] must be above 0"),
        (torch.optim.Adam, torch.bfloat16, "in the parameters' torch.bfloat16, which is too coarse; keep"),
    ],
)
def test_adam_tracking_refuses_what_has_no_second_moment_to_change(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        GossipDataParallel(nn.Linear(2, 1, dtype=dtype), make, algorithm="adam_tracking")


def test_adam_tracking_goes_on_from_the_moments_of_adam() -> None:
    """The count that corrects their bias comes with the optimizer's state; alone the algorithm is Adam."""
    torch.manual_seed(0)
    plain, inputs = nn.Linear(3, 2, dtype=torch.float64), torch.randn(20, 4, 3, dtype=torch.float64)
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    for batch in inputs:
        adam.zero_grad()
        plain(batch).square().mean().backward()
        adam.step()
    module = copy.deepcopy(plain)
    with GossipDataParallel(module, partial(torch.optim.Adam, lr=0.01), algorithm="adam_tracking") as model:
        model.optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
        for batch in inputs[:3]:
            model(batch).square().mean().backward()
            adam.zero_grad()
            plain(batch).square().mean().backward()
            adam.step()
            torch.testing.assert_close(module.weight, plain.weight, rtol=0, atol=1e-12)
