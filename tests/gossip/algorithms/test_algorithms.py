"""The mixing factor, rounding, and what Adam tracking refuses and goes on from; the recursions are in the contract."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_runs import finish
from torch import nn

import gossip
from gossip import AdaptThenCombine, AdaptWhileCommunicating, Algorithm, GossipDataParallel, VirtualWorkers


@pytest.mark.parametrize("algorithm", [AdaptThenCombine(), AdaptWhileCommunicating(gamma=0.25)])
def test_half_precision_is_rounded_once(algorithm: Algorithm) -> None:
    values = torch.full((3,), 1.0, dtype=torch.bfloat16)
    # 3/4 of the last place: lost, if it were rounded before it is added
    algorithm.combine_(values, torch.full((3,), 0.75 * 2**-7 / algorithm.gamma), 0)
    assert torch.equal(values, torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize("gamma", [-0.1, float("nan")])
def test_mixing_factor_out_of_range_is_refused(gamma: object) -> None:
    with pytest.raises(ValueError, match=r"gamma must be between 0 and 1"):
        AdaptWhileCommunicating(gamma)
    with pytest.raises(ValueError, match=r"gamma must be between 0 and 1"):
        AdaptThenCombine(lambda _: gamma).combine_(torch.zeros(1), torch.zeros(1), 0)


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (gossip.DiLoCo, {"period": 0}, "period must be at least 1, got 0"),
        (gossip.DiLoCo, {"outer_lr": -1.0}, r"outer_lr must be above 0 and finite, got -1\.0"),
        (gossip.DiLoCo, {"outer_momentum": 1.0}, r"outer_momentum must be at least 0 and below 1, got 1\.0"),
        (gossip.SlowMo, {"slow_momentum": -0.1}, r"slow_momentum must be at least 0 and below 1, got -0\.1"),
        (gossip.SlowMo, {"slow_lr": 0}, "slow_lr must be above 0 and finite, got 0"),
        (gossip.FactoredGossip, {"period": 0}, "period must be at least 1, got 0"),
        (gossip.FactoredGossip, {"period": 5, "rounds": 3, "overlap": 2}, "rounds=3 of overlap=2 .* than the 5 steps"),
        (gossip.FactoredGossip, {"kappa": 2.0}, "kappa must be between 0 and 1, got 2.0"),
        (gossip.FactoredGossip, {"form": "atc", "overlap": 2}, "overlap=2: form=.atc. awaits .*; pass 1"),
        (gossip.GASLoC, {"outer_lr": 0}, "outer_lr must be above 0 and finite, got 0"),
        (gossip.NoLoCo, {"pull": 0}, "pull must be above 0 and finite, got 0"),
        (gossip.StreamingDiLoCo, {"period": 3}, "parts must be at most 3, got 4"),
        (gossip.StreamingDiLoCo, {"overlap": 0}, "overlap must be at least 1, got 0"),
        (gossip.Asynchronous, {"max_staleness": 0}, "max_staleness must be at least 1, got 0"),
        (gossip.IntegralCorrection, {"form": "cta"}, r'form must be "awc" .*, got \'cta\''),
        (gossip.IntegralCorrection, {"gamma": 0}, "gamma must be above 0 and at most 1, got 0"),
        (gossip.IntegralCorrection, {"kappa": -0.1}, r"kappa must be between 0 and 1, got -0\.1"),
        (gossip.IntegralCorrection, {"second_moment": "mean"}, 'second_moment must be "local" or "exchange", got'),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[..., Algorithm], arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**arguments)


def test_mixing_factor_may_follow_the_round() -> None:
    values = torch.zeros(3)
    algorithm = AdaptWhileCommunicating(lambda t: 1 / (1 + t))
    algorithm.combine_(values, torch.ones(3), 3)
    assert torch.equal(values, torch.full((3,), 0.25))


@pytest.mark.parametrize(
    ("make", "dtype", "text"),
    [
        (torch.optim.SGD, torch.float32, r"of torch.optim.Adam and AdamW, but the optimizer is torch.optim.sgd.SGD"),
        (partial(torch.optim.AdamW, amsgrad=True), torch.float32, "amsgrad=True would keep the maximum; pass amsgrad="),
        (partial(torch.optim.Adam, betas=(0.9, 0.0)), torch.float32, r"betas\[1\] must be above 0"),
        (partial(torch.optim.Adam, weight_decay=0.1), torch.float32, "without the weight_decay .* choose AdamW"),
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


class Heads(nn.Module):
    """Of two heads, the second one is trained in even steps, and in the end neither it nor its trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.first, self.second = (nn.Linear(2, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        found = self.first(self.trunk(batch))
        return found + self.second(self.trunk(batch)) if step % 2 == 0 else found  # type: ignore[no-any-return]


WAYS: dict[str, dict[str, object]] = {
    "by bucket": {},
    "together": {"clip_grad_norm": 1e9},
    "usual loop": {"step_in_backward": False},
}


@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25])  # a bucket for each parameter, and one for all
def test_what_has_no_gradient_is_directed_alike_in_all_ways(bucket_cap_mb: float) -> None:
    """A bucket without any is left alone, and so is what is frozen again."""
    sgd = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    common: dict[str, Any] = {"algorithm": "quasi_global_momentum", "bucket_cap_mb": bucket_cap_mb}
    models: list[Any] = [GossipDataParallel(Heads(), sgd, **common, **way) for way in WAYS.values()]
    models += [VirtualWorkers(Heads(), 1, sgd, devices=["cpu"], **common, **way) for way in list(WAYS.values())[:2]]
    found = []
    for model in models:
        for step in range(8):
            if step == 5:
                frozen = [each for name, each in model.named_parameters() if "trunk" in name]
                before = [each.detach().clone().squeeze() for each in frozen]
                for each in frozen:
                    each.requires_grad_(False)
            model(torch.ones(1, 2, dtype=torch.float64), step).square().mean().backward()
            if isinstance(model, GossipDataParallel):
                finish(model)
        assert all(torch.equal(each.squeeze(), own) for each, own in zip(frozen, before, strict=True))
        found.append(torch.cat([each.detach().flatten() for _, each in sorted(model.named_parameters())]))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-12)


def test_gradients_of_several_optimizers_are_not_directed_by_the_first_step() -> None:
    with pytest.raises(ValueError, match="unscaled or checked those of the others; pass one optimizer"):
        GossipDataParallel(
            nn.Linear(2, 1),
            lambda named: tuple(torch.optim.SGD([each], lr=0.1) for each in named),
            algorithm="gradient_tracking",
            step_in_backward=False,
        )


def test_adam_tracking_leaves_the_moments_of_a_replica_without_samples() -> None:
    adam = partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.95))
    workers = VirtualWorkers(nn.Linear(2, 1), 2, adam, algorithm="adam_tracking", devices=["cpu"])
    for num_samples in (2, 2, 2, 2, 2, 1):
        moments = [entry["exp_avg_sq"][1].clone() for entry in workers.optimizer.state.values()]
        workers(torch.randn(num_samples, 2)).square().mean().backward()
    assert all(map(torch.equal, moments, (entry["exp_avg_sq"][1] for entry in workers.optimizer.state.values())))
