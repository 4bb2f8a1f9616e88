"""What the ranks of a group have to do alike, and that it is named where it cannot be done or is not finite."""

import contextlib
import math
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from sharded_models import make_mesh, make_sharded, values_of
from small_runs import SGD
from torch import nn

import gossip
from gossip import GossipDataParallel, GossipError
from gossip.sharding.local_group import ReplicaGroup, part_of

WAYS = ("fsdp", "optimizer", "none")


class Net(nn.Sequential):
    """Three layers, of which the first is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.middle, self.tanh, self.last = nn.Linear(3, 3).double(), nn.Tanh(), nn.Linear(3, 3).double()
        self.register_buffer("offset", torch.randn(2, dtype=torch.float64))


def wrap(module: nn.Module, way: str, **options: Any) -> GossipDataParallel:
    module, divided = make_sharded(module, (2, 2), way)
    options = {"optimizer": SGD, "topology": "ring", "timeout": timedelta(seconds=20), **divided, **options}
    return GossipDataParallel(module, **options)


def inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def start(way: str) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    module = Net()
    with wrap(module, way):
        return torch.cat([values_of(module), module.offset])


@pytest.mark.parametrize("way", WAYS)
def test_ranks_start_from_the_first_ones_values(way: str) -> None:
    """Frozen parameters and buffers too, with several parameters in a bucket."""
    found = run_ranks(start, way, world_size=4)
    torch.manual_seed(0)
    module = Net()
    wanted = torch.cat([values_of(module), module.offset])
    for values in found:
        if way == "fsdp":  # fully_shard has taken each rank's rows of its own values
            assert torch.equal(values, found[0])
            assert torch.equal(values[-2:], wanted[-2:])
        else:
            assert torch.equal(values, wanted)


def be_idle_in_optimizer_steps(way: str) -> str:
    with wrap(Net(), way, step_in_backward=False, timeout=timedelta(seconds=5)) as model:
        model.idle_step()  # together
        assert model.step == 1
        try:
            if dist.get_rank() % 2:
                model.idle_step()
            else:
                loss_of(model, inputs(0)).backward()
                model.optimizer.step()
        except GossipError as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["optimizer", "none"])
def test_with_optimizer_steps_a_group_is_idle_together(way: str) -> None:
    found = run_ranks(be_idle_in_optimizer_steps, way, world_size=4)
    for rank in (1, 3):
        assert "step 1: idle_step() on this rank, but other ranks of its group" in found[rank]
        assert "step_in_backward=False all ranks of a group must be idle together" in found[rank]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_steps_whose_gradients_were_not_averaged_are_refused(way: str) -> None:
    """Or that a loop wrote itself."""
    with wrap(Net(), way, step_in_backward=False) as model:
        with model.no_sync():
            loss_of(model, inputs(0)).backward()
        with pytest.raises(GossipError, match=r"step 0: the last backward pass before .* was under no_sync\(\)"):
            model.optimizer.step()
    with wrap(Net(), way, step_in_backward=False) as model:
        loss_of(model, inputs(0)).backward()
        model.optimizer.step()
        for parameter in model.module.parameters():
            parameter.grad = parameter.detach().clone()
        with pytest.raises(GossipError, match=r"step 1: there are gradients that did not come from a backward"):
            model.optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_norms_are_those_of_the_whole_group(way: str) -> None:
    with wrap(Net(), way, step_in_backward=False) as model:
        loss_of(model, inputs(0)).backward()
        assert math.isfinite(model.clip_grad_norm_(1.0, norm_type=math.inf))
        if way == "none":
            return
        with pytest.raises(ValueError, match="norm_type must be a positive number or inf with mesh, got 0"):
            model.clip_grad_norm_(1.0, norm_type=0.0)
        shards, place = model._live().group, dist.get_rank() % 2  # of what each of the ranks has
        assert float(shards.norm(torch.tensor(1.0 + place), math.inf)) == 2.0
        assert float(shards.norm(torch.tensor(1.0 + place), 1.0)) == 3.0
        for is_no_number in (0, 1):
            assert torch.isnan(shards.norm(torch.tensor(math.nan if place == is_no_number else 1.0), math.inf))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_accumulated_gradients_are_in_a_checkpoint(way: str, tmp_path: Path) -> None:
    module = Net()
    with wrap(module, way) as model:
        loss_of(model, inputs(0)).backward()
        with model.no_sync():
            loss_of(model, inputs(1)).backward()
        gossip.save(model, tmp_path)
        loss_of(model, inputs(2)).backward()
        wanted = values_of(module)
        gossip.load(model, tmp_path)
        loss_of(model, inputs(2)).backward()
        assert torch.equal(values_of(module), wanted)
    module = Net()
    with wrap(module, way) as model:
        gossip.load(model, tmp_path)
        loss_of(model, inputs(2)).backward()
        assert torch.equal(values_of(module), wanted)


class Failing(Net):
    """Whose backward pass fails on request, before or after the gradients of the last layer."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self._watched(torch.tanh(self.middle(x)), "after"))
        return self._watched(y, "before") * 1.0  # the pass has begun when it fails

    def _watched(self, y: torch.Tensor, where: str) -> torch.Tensor:
        def fail(_: torch.Tensor) -> None:
            if self.fails == where:
                raise ZeroDivisionError

        y.register_hook(fail)
        return y


def fail_and_go_on(way: str, where: str, **options: Any) -> torch.Tensor | str:
    torch.manual_seed(0)
    module = Failing()
    with wrap(module, way, bucket_cap_mb=1e-5, **options) as model:
        if where:
            with model.no_sync():  # gradients that the pass that fails adds to
                loss_of(model, inputs(5)).backward()
            module.fails = where
            with pytest.raises(ZeroDivisionError):
                loss_of(model, inputs(0)).backward()
            module.fails = ""
        try:
            for step in range(1, 4):
                loss_of(model, inputs(step)).backward()
                model.optimizer.step()
        except GossipError as error:
            return str(error)
        return values_of(module)


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.1}, {"step_in_backward": False}])
def test_a_backward_pass_that_fails_leaves_no_gradients(options: dict[str, Any]) -> None:
    """Or ends the training, if some had been averaged over the group."""
    partly = run_ranks(partial(fail_and_go_on, **options), "optimizer", "after", world_size=4)
    for text in partly:
        assert isinstance(text, str)
        assert "some gradients had been averaged over the ranks of its group and others had not" in text
    wanted = run_ranks(partial(fail_and_go_on, **options), "optimizer", "", world_size=4)
    for rank, found in enumerate(run_ranks(partial(fail_and_go_on, **options), "optimizer", "before", world_size=4)):
        assert torch.equal(found, wanted[rank])


STILL = partial(torch.optim.SGD, lr=0.0)
NUMEL = 12


def test_parts_make_up_a_bucket() -> None:
    for numel in range(10):
        for num_parts in range(1, 12):
            parts = [range(numel)[part_of(numel, place, num_parts)] for place in range(num_parts)]
            assert [index for part in parts for index in part] == list(range(numel))


def test_the_mean_of_gradients_says_whose_it_is() -> None:
    module, world = nn.Linear(2, 3), Mock(rank=0, world_size=2, is_alone=False)
    ReplicaGroup(module, world).reduce_(module.parameters(), step=4, index=7)
    (_, what), _ = world.sum_.call_args
    assert what.startswith("step 4, bucket 7:")


def exchange_what_is_not_finite(place: int, compression: str | None) -> tuple[torch.Tensor, int, bool]:
    """The second group's message is not finite in the part that its rank at ``place`` sends."""
    mesh = make_mesh(2, 2)
    module = nn.Linear(NUMEL, 1, bias=False)
    group, refused, has_failed = dist.get_rank() // 2, 0, False
    model = GossipDataParallel(module, STILL, "ring", mesh=mesh, shard="none", compression=compression)
    for step in range(3):
        if group == 1 and step == 1:
            with torch.no_grad():
                module.weight[0, part_of(NUMEL, place, 2)] = math.nan
        try:
            module(torch.ones(1, NUMEL)).sum().mul(0.0).backward()
        except GossipError:
            has_failed = True
            break
        refused += model.stats().num_refused
    values = module.weight.detach().clone()
    with contextlib.suppress(GossipError):  # the second group has sent nothing since
        model.close()
    return values, refused, has_failed


@pytest.mark.parametrize(("place", "compression"), [(0, "int8"), (1, None)])
def test_all_ranks_of_a_group_refuse_a_part_that_is_not_finite(place: int, compression: str | None) -> None:
    first, second, *others = run_ranks(exchange_what_is_not_finite, place, compression, world_size=4)
    assert first[1] == second[1] == 1
    assert torch.isfinite(first[0]).all()
    assert torch.equal(first[0], second[0])
    assert all(has_failed for _, _, has_failed in others), "what they sent was not finite"
