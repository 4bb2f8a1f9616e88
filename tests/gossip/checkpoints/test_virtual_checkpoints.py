"""What virtual workers save goes on bit for bit, on other devices too; what is not what was saved is refused."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from replicas import assert_equal_states
from separate import ADAM, SGD, batch, everything, make_module, make_workers, stacked, train
from torch import nn

import gossip
from gossip import VirtualWorkers
from gossip.step.state.algorithm_state import load_algorithm_state


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
    compression: str | None, optimizer: Any, tmp_path: Path, warnings_told: list[str]
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
    assert not warnings_told


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


def simply(algorithm: gossip.Algorithm | str, topology: str = "ring") -> VirtualWorkers:
    return make_workers(make_module(), 3, partial(torch.optim.SGD, lr=0.1), topology=topology, algorithm=algorithm)


WEIGHTED = gossip.PushSum(weighted=True)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (WEIGHTED, "adapt_while_communicating"),
        ("adapt_while_communicating", "gradient_tracking"),
        (gossip.NoLoCo(period=2), gossip.DiLoCo(period=2)),
    ],
)
def test_another_algorithm_begins_with_the_values_alone(
    saved: Any, loaded: Any, tmp_path: Path, warnings_told: list[str]
) -> None:
    topology = "complete" if isinstance(loaded, gossip.DiLoCo) else "ring"
    before, resumed, fresh = simply(saved, topology), simply(loaded, topology), simply(loaded, topology)
    for seed in range(4):
        if before.algorithm.weighted:
            before.weigh([8, 16, 24])
        train(before, batch(6, seed=seed))
    gossip.save(before, tmp_path)
    gossip.load(resumed, tmp_path)
    assert any("the messages in flight: the algorithm differs" in line for line in warnings_told)
    for (_, own), (_, other) in zip(fresh.named_parameters(), before.named_parameters(), strict=True):
        own.data.copy_(other.data)
    fresh._exchanges.drop()
    load_algorithm_state(fresh._exchanges, None)
    for each in (resumed, fresh):
        for seed in range(4):
            train(each, batch(6, seed=seed))
    assert_equal_states(stacked(resumed), stacked(fresh))


def test_another_topology_drops_nothing_but_what_is_in_flight(tmp_path: Path) -> None:
    workers, resumed = simply(WEIGHTED), simply(WEIGHTED, "complete")
    workers.weigh([8, 16, 24])
    train(workers, batch(6))
    with workers.no_sync():
        train(workers, batch(2))
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    assert resumed._exchanges.samples.tolist() == [8, 16, 24]  # type: ignore[union-attr]
    assert torch.equal(resumed._updater.scales, workers._updater.scales)
    assert workers._updater.scales.tolist() != [1.0] * 3


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


class Caching(nn.Linear):
    """Its buffer is in no state_dict."""

    def __init__(self, length: int) -> None:
        super().__init__(3, 2)
        self.register_buffer("cache", torch.zeros(length), persistent=False)


def test_buffers_that_no_state_dict_has_are_restored_if_they_fit(tmp_path: Path, warnings_told: list[str]) -> None:
    workers, resumed, longer = (make_workers(Caching(length), 3) for length in (4, 4, 5))
    ((_, stack),) = workers.named_buffers()
    stack.copy_(torch.randn(3, 4))
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    assert torch.equal(dict(resumed.named_buffers())["cache"], stack)
    assert not warnings_told
    gossip.load(longer, tmp_path)
    assert "buffer 'cache', which is not persistent and has another shape or dtype here" in warnings_told[0]


def test_bad_steps_count_on(tmp_path: Path) -> None:
    spoilt = torch.full((6, 3), float("nan"), dtype=torch.float64)
    workers, resumed = (make_workers(make_module(), 3) for _ in range(2))
    for _ in range(15):
        train(workers, spoilt)
    gossip.save(workers, tmp_path)
    gossip.load(resumed, tmp_path)
    with pytest.raises(RuntimeError, match="16 consecutive steps"):
        train(resumed, spoilt)


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
