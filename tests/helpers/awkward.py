"""A module with parameters of every kind that storage, stacks and buckets must keep apart."""

import torch
from torch import nn
from torch.nn import functional


class Awkward(nn.Module):
    """Frozen, tied, unused, scalar, empty, half, transposed and channels_last parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.unused = nn.Linear(2, 5)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.filters = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.third(self.second(self.first(inputs * self.frozen)))) * self.scalar
        image = (hidden @ self.transposed * self.brief)[..., None, None].expand(-1, -1, 2, 2)
        return functional.conv2d(image, self.filters) + self.empty.sum()
