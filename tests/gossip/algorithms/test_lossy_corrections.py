"""Corrections add up what exchanges deliver: they must not add up what codecs lose, or rounding."""

from functools import partial

import pytest
import torch
from torch import nn

import gossip
from gossip import Algorithm, Compression, VirtualWorkers
from gossip.algorithms import IntegralCorrection

NUM_RANKS, NUM_VALUES = 8, 64


class Quadratic(nn.Module):
    """0.5 |x - optimum|^2, each rank's optimum another one."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0)))

    def forward(self, optima: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((self.x - optima) ** 2).sum(-1)


def distances(
    algorithm: Algorithm | str, topology: str, compression: Compression | str | None, num_steps: int
) -> tuple[float, float]:
    """In the second half of the steps, at worst: of a replica from their mean, and of the mean from the optimum."""
    workers = VirtualWorkers(
        Quadratic(),
        NUM_RANKS,
        partial(torch.optim.SGD, lr=0.1),
        topology,
        algorithm=algorithm,
        compression=compression,
        devices=["cpu"],
    )
    optima = torch.randn(NUM_RANKS, NUM_VALUES, generator=torch.Generator().manual_seed(1))
    (stack,) = workers.parameters()
    spread = error = 0.0
    for step in range(num_steps):
        workers(optima).mean().backward()
        if step >= num_steps // 2:
            mean = stack.detach().double().mean(0)
            spread = max(spread, float((stack.detach() - mean).norm(dim=1).max()))
            error = max(error, float((mean - optima.double().mean(0)).norm()))
    return spread, error


CHOCO = {sparsifier: gossip.Choco(sparsifier=sparsifier) for sparsifier in ("top_k", "sign")}
FLOORS: list[tuple[str, Compression | str | None, int, float]] = [
    ("ring", "bf16", 300, 3e-2),  # the values' own resolution, 2^-8 of each, for 64 of them
    ("one_peer_exponential", "int4", 300, 1e-5),
    ("ring", CHOCO["top_k"], 600, 1e-2),
    ("ring", CHOCO["sign"], 600, 1e-2),
]
FORMS = [IntegralCorrection("awc"), IntegralCorrection("atc")]


@pytest.mark.parametrize(
    ("algorithm", "topology", "compression", "num_steps", "floor"),
    [(FORMS[number % 2], *row) for number, row in enumerate(FLOORS)],
)
def test_corrected_replicas_end_as_near_as_the_codec_can_tell(
    algorithm: Algorithm, topology: str, compression: Compression | str | None, num_steps: int, floor: float
) -> None:
    """Those of gossip end 1 to 5 apart, as their data are."""
    spread, error = distances(algorithm, topology, compression, num_steps)
    assert spread < floor
    assert error < 5e-5
