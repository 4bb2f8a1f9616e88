"""What virtual workers save goes on bit for bit, on other devices too; what is not what was saved is refused."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from loguru import logger
from separate import SGD, assert_equal_states, batch, everything, make_module, make_workers, stacked, train
from torch import nn

import gossip
from gossip import CheckpointError, Choco, GossipError, VirtualWorkers

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    found: list[str] = []
    handle = logger.add(lambda message: found.append(message.record["message"]), level="WARNING")
    yield found
    logger.remove(handle)


def make(world_size: int = 3, optimizer: Any = SGD, **arguments: Any) -> VirtualWorkers:
    """With dropout, statistics, and parameters of several kinds."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).double()
    module[3].bias.requires_grad_(False)  # type: ignore[union-attr]
    module.register_parameter("scale", nn.Parameter(torch.ones(()).double()))
    return make_workers(module, world_size, optimizer, **({"topology": "ring"} | arguments))


def run(workers: VirtualWorkers, steps: range) -> None:
    for step in steps:
        workers.module.scale.data.fill_(1.0)  # type: ignore[union-attr, operator]
        train(workers, batch(11, seed=step), lambda model, inputs: model(inputs).square().mean())


@pytest.mark.parametrize("optimizer", [SGD, ADAM, lambda named: (SGD(named[:2]), ADAM(named[2:]))])
@pytest.mark.parametrize("compression", [None, "bf16", "int8", "choco"])
def test_resumed_run_goes_on_bit_for_bit(
    compression: str | None, optimizer: Any, tmp_path: Path, warned: list[str]
) -> None:
    workers = make(optimizer=optimizer, compression=compression, buffers="average")
    run(workers, range(3))
    gossip.save(workers, tmp_path)
    run(workers, range(3, 6))
    resumed = make(optimizer=optimizer, compression=compression, buffers="average")
    run(resumed, range(7, 9))  # whatever it was before
    gossip.load(resumed, tmp_path)
    assert resumed.step == 3
    run(resumed, range(3, 6))
    assert_equal_states(everything(resumed), everything(workers))
    assert not warned


def test_what_a_compression_makes_of_padding_is_not_missed(tmp_path: Path) -> None:
    def odd() -> VirtualWorkers:
        torch.manual_seed(0)
        return make_workers(nn.Linear(3, 5).double(), 3, topology="ring", compression=Choco(sparsifier="sign"))

    workers, resumed = odd(), odd()
    for step in range(4):
        train(workers, batch(6, seed=step))
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    for step in range(4, 8):
        train(workers, batch(6, seed=step))
        train(resumed, batch(6, seed=step))
    assert_equal_states(stacked(resumed), stacked(workers))


@pytest.mark.parametrize("before", [["cpu"], ["cpu"] * 2])
@pytest.mark.parametrize("after", [["cpu"], ["cpu"] * 3])
def test_devices_may_be_others(before: list[str], after: list[str], tmp_path: Path) -> None:
    workers = make(5, ADAM, devices=before)
    run(workers, range(3))
    gossip.save(workers, tmp_path)
    resumed = make(5, ADAM, devices=after)
    gossip.load(resumed, tmp_path)
    assert_equal_states(everything(resumed), everything(workers))
    for each in (workers, resumed):
        each.eval()  # dropout draws by device
        run(each, range(3, 6))
    for one, other in zip(stacked(workers).values(), stacked(resumed).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("goes_on_with", ["idle step", "gradients of all"])
@pytest.mark.parametrize("num_samples", [2, 3, 5])
def test_gradients_that_were_accumulated_are_saved(num_samples: int, goes_on_with: str, tmp_path: Path) -> None:
    def accumulate(workers: VirtualWorkers) -> None:
        with workers.no_sync():
            train(workers, batch(num_samples))

    workers, resumed = (make_workers(make_module(), 3) for _ in range(2))
    accumulate(workers)
    accumulate(resumed)
    accumulate(resumed)
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    for each in (workers, resumed):
        if goes_on_with == "idle step":
            each.idle_step()
        train(each, batch(6))
    assert_equal_states(everything(resumed), everything(workers))


class Selective(nn.Sequential):
    """Leaves its first layer out for negative inputs, where it ``looks`` at them; that cannot be vectorised."""

    looks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks and bool((x < 0).all()):
            return self[1](x)  # type: ignore[no-any-return]
        return self[1](self[0](x))  # type: ignore[no-any-return]


def test_parameter_whose_saved_gradient_one_rank_lacks_gets_the_next_one(tmp_path: Path) -> None:
    def make_selective() -> VirtualWorkers:
        torch.manual_seed(0)
        return make_workers(Selective(nn.Linear(3, 3), nn.Linear(3, 2)).double(), 3)

    workers, resumed = make_selective(), make_selective()
    workers.module.looks = True  # type: ignore[assignment]
    with workers.no_sync():
        train(workers, batch(6).abs() * torch.tensor([-1.0, -1, 1, 1, 1, 1]).view(-1, 1))
    assert not workers.is_vectorised
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    for each in (workers, resumed):
        train(each, batch(6, seed=1).abs())
    assert resumed.is_vectorised
    for name, values in stacked(workers).items():
        torch.testing.assert_close(stacked(resumed)[name], values, rtol=0, atol=1e-12)


def test_parameters_that_were_unfrozen_keep_their_buckets(tmp_path: Path) -> None:
    workers, resumed = make(), make()
    for name, stack in workers.named_parameters():
        if name == "3.bias":
            stack.requires_grad_(True)
    run(workers, range(3))
    gossip.save(workers, tmp_path)
    run(workers, range(3, 6))
    gossip.load(resumed, tmp_path)
    for name, stack in resumed.named_parameters():
        if name == "3.bias":
            stack.requires_grad_(True)
    run(resumed, range(3, 6))
    assert_equal_states(everything(resumed), everything(workers))


def test_bad_steps_count_on(tmp_path: Path) -> None:
    spoilt = torch.full((6, 3), float("nan"), dtype=torch.float64)
    workers, resumed = (make_workers(make_module(), 3) for _ in range(2))
    for _ in range(15):
        train(workers, spoilt)
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    with pytest.raises(RuntimeError, match="16 consecutive steps"):
        train(resumed, spoilt)


def test_random_numbers_of_all_kinds_are_restored(tmp_path: Path) -> None:
    workers = make()
    gossip.save(workers, tmp_path)
    drawn = torch.rand(2), np.random.rand(2), random.random()  # noqa: NPY002
    gossip.load(workers, tmp_path)
    again = torch.rand(2), np.random.rand(2), random.random()  # noqa: NPY002
    assert torch.equal(drawn[0], again[0])
    assert np.array_equal(drawn[1], again[1])
    assert drawn[2] == again[2]


def test_parts_and_data_come_back(tmp_path: Path) -> None:
    workers, resumed = make(), make()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each.optimizer, 0.5) for each in (workers, resumed)]
    run(workers, range(2))
    schedulers[0].step()
    gossip.save(workers, tmp_path, scheduler=schedulers[0], batch=17)
    checkpoint = gossip.load(resumed, tmp_path, scheduler=schedulers[1])
    assert schedulers[1].get_last_lr() == schedulers[0].get_last_lr()
    assert resumed.optimizer.param_groups[0]["lr"] == workers.optimizer.param_groups[0]["lr"]
    assert (checkpoint.step, checkpoint.world_size, checkpoint.data) == (2, 3, {"batch": 17})


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_another_number_of_replicas_starts_from_the_mean_and_says_so(
    world_size: int, tmp_path: Path, warned: list[str]
) -> None:
    workers = make(3, ADAM)
    run(workers, range(3))
    gossip.save(workers, tmp_path)
    resumed = make(world_size, ADAM)
    gossip.load(resumed, tmp_path)
    saved = stacked(workers)
    for name, stack in resumed.named_parameters():
        torch.testing.assert_close(stack, saved[name].mean(0).expand_as(stack))
    for (name, stack), (_, values) in zip(resumed.named_buffers(), workers.named_buffers(), strict=True):
        mean = values.mean(0) if values.is_floating_point() else values[0]
        torch.testing.assert_close(stack, mean.expand_as(stack), msg=name)
    first, old = (dict(each.named_parameters())["0.weight"] for each in (resumed, workers))
    momentum = workers.optimizer.state[old]["exp_avg"].mean(0)
    torch.testing.assert_close(resumed.optimizer.state[first]["exp_avg"], momentum.expand_as(first))
    assert [f"there were 3 and are now {world_size}, which all start" in each for each in warned] == [True]
    run(resumed, range(3, 5))
    assert resumed.step == 5


@pytest.mark.parametrize("change", [{"compression": "int8"}, {"bucket_cap_mb": 25.0}, {"buffers": "average"}])
def test_what_was_in_flight_in_other_messages_is_left_out_with_a_warning(
    change: dict[str, Any], tmp_path: Path, warned: list[str]
) -> None:
    workers = make()
    run(workers, range(2))
    gossip.save(workers, tmp_path)
    resumed = make(**change)
    gossip.load(resumed, tmp_path)
    assert ["not: the messages in flight" in each for each in warned] == [True]
    for found, wanted in zip(everything(resumed), everything(workers), strict=True):
        for key in ("parameters", "buffers", "rng"):
            assert_equal_states(found[key], wanted[key])
    run(resumed, range(2, 4))
    assert resumed.step == 4


class Other(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("level", torch.zeros(3))


@pytest.mark.parametrize(
    ("module", "optimizer", "text"),
    [
        (nn.Linear(3, 4), SGD, r"parameter 'weight' is float32 \[2, 3\] in the checkpoint, but float32 \[4, 3\] here"),
        (nn.Linear(3, 2).double(), SGD, r"parameter 'weight' is float32 .* but float64 \[2, 3\] here"),
        (nn.Linear(3, 2, bias=False), SGD, r"parameter 'bias' is float32 \[2\] in the checkpoint, but nothing here"),
        (Other(), SGD, r"buffer 'level' is nothing in the checkpoint, but float32 \[3\] here"),
        (nn.Linear(3, 2), ADAM, "optimizer is SGD in the checkpoint, but Adam here"),
        (
            nn.Linear(3, 2),
            lambda named: SGD([{"params": named[:1]}, {"params": named[1:]}]),
            "number of groups is 1 in the checkpoint, but 2 here",
        ),
        (nn.Linear(3, 2), None, "number of optimizers is 1 in the checkpoint, but 0 here"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_another_models_state_is_refused_by_its_first_difference(
    module: nn.Module, optimizer: Any, text: str, devices: int, tmp_path: Path
) -> None:
    gossip.save(make_workers(nn.Linear(3, 2), 2), tmp_path)
    other = make_workers(copy.deepcopy(module), 2, optimizer, devices=["cpu"] * devices)
    before = everything(other)
    with pytest.raises(CheckpointError, match=text):
        gossip.load(other, tmp_path)
    assert_equal_states(everything(other), before)


def test_inside_averaged_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    workers = make_workers(make_module(), 2)
    with (
        workers.averaged(),
        pytest.raises(GossipError, match=r"step 0: nothing can be saved or loaded inside averaged\(\)"),
    ):
        gossip.save(workers, tmp_path)


def test_what_cannot_be_saved_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    workers = make_workers(make_module(), 2)
    gossip.save(workers, tmp_path)
    train(workers, batch(4))
    workers.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(TypeError, match=r"'note'.* which a checkpoint cannot hold"):
        gossip.save(workers, tmp_path)
    del workers.optimizer.param_groups[0]["note"]
    workers.optimizer.state[workers.optimizer.param_groups[0]["params"][1]]["mark"] = object()
    with pytest.raises(
        TypeError, match=r"the state of parameter '[a-z.0-9]*bias' in \w+\['mark'\] is a builtins.object"
    ):
        gossip.save(workers, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000000"]


@pytest.mark.parametrize("devices", [1, 2])
def test_export_is_the_mean(devices: int, tmp_path: Path) -> None:
    workers = make(3, buffers="average", devices=["cpu"] * devices)
    run(workers, range(3))
    before = everything(workers)
    gossip.export(workers, tmp_path / "model.safetensors")
    assert_equal_states(everything(workers), before)
    module = copy.deepcopy(workers.module)
    safetensors.torch.load_model(module, tmp_path / "model.safetensors")
    with workers.averaged() as averaged:
        assert_equal_states(dict(module.state_dict()), dict(averaged.state_dict()))
