"""Loss and accuracy on a test split."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn

from gossip.communication.world import World
from gossip.lab.experiments.evaluation import cross_entropy, evaluate, evaluate_together


class Recorder(nn.Module):
    """Gives its inputs as logits and notes in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        return inputs


@pytest.mark.parametrize("shape", [(1000,), (300, 7)], ids=["images", "text"])
def test_evaluate_is_the_mean_over_all_predictions(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 5, generator=generator)
    targets = torch.randint(5, shape, generator=generator)
    module = Recorder()
    for evaluation in (
        evaluate(module, logits, targets),
        evaluate_together(module, logits, targets, World(timedelta(seconds=5))),
    ):
        assert evaluation.accuracy == pytest.approx(float((logits.argmax(-1) == targets).double().mean()))
        assert evaluation.loss == pytest.approx(float(cross_entropy(logits, targets)), rel=1e-5)
    assert len(module.modes) > 2
    assert set(module.modes) == {(False, False)}
    assert module.training
