"""What is saved goes on bit for bit, on other devices too; what is not what was saved is refused."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger
from separate import SGD, assert_equal_states, batch, make_module, make_workers, train
from torch import nn

from gossip import CheckpointError, Choco, VirtualWorkers

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
def test_a_resumed_run_goes_on_bit_for_bit(
    compression: str | None, optimizer: Any, tmp_path: Path, warned: list[str]
) -> None:
    workers = make(optimizer=optimizer, compression=compression)
    run(workers, range(3))
    workers.save(tmp_path / "state")
    run(workers, range(3, 6))
    resumed = make(optimizer=optimizer, compression=compression)
    run(resumed, range(7, 9))  # whatever it was before
    resumed.load(tmp_path / "state")
    assert resumed.step == 3
    run(resumed, range(3, 6))
    assert_equal_states(resumed.state_dict(), workers.state_dict())
    assert not warned
    assert os.listdir(tmp_path) == ["state"]


def test_what_a_compression_makes_of_padding_is_not_missed() -> None:
    def odd() -> VirtualWorkers:
        torch.manual_seed(0)
        return make_workers(nn.Linear(3, 5).double(), 3, topology="ring", compression=Choco(sparsifier="sign"))

    workers, resumed = odd(), odd()
    for step in range(4):
        train(workers, batch(6, seed=step))
    resumed.load_state_dict(workers.state_dict())
    for step in range(4, 8):
        train(workers, batch(6, seed=step))
        train(resumed, batch(6, seed=step))
    assert_equal_states(resumed.state_dict(), workers.state_dict())


@pytest.mark.parametrize("before", [["cpu"], ["cpu"] * 2])
@pytest.mark.parametrize("after", [["cpu"], ["cpu"] * 3])
def test_devices_may_be_others(before: list[str], after: list[str], tmp_path: Path) -> None:
    workers = make(5, ADAM, devices=before)
    run(workers, range(3))
    workers.save(tmp_path / "state")
    resumed = make(5, ADAM, devices=after)
    resumed.load(tmp_path / "state")
    assert_equal_states(resumed.state_dict(), workers.state_dict())
    for each in (workers, resumed):
        each.eval()  # dropout draws by device
        run(each, range(3, 6))
    for one, other in zip(
        workers.state_dict()["parameters"].values(), resumed.state_dict()["parameters"].values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_gradients_that_were_accumulated_are_saved() -> None:
    def accumulate(workers: VirtualWorkers) -> None:
        with workers.no_sync():
            train(workers, batch(2))

    workers, resumed = (make_workers(make_module(), 3) for _ in range(2))
    accumulate(workers)
    accumulate(resumed)
    accumulate(resumed)
    resumed.load_state_dict(workers.state_dict())
    for each in (workers, resumed):
        each.idle_step()
        train(each, batch(6))
    assert_equal_states(resumed.state_dict(), workers.state_dict())


def test_bad_steps_count_on() -> None:
    spoilt = torch.full((6, 3), float("nan"), dtype=torch.float64)
    workers, resumed = (make_workers(make_module(), 3) for _ in range(2))
    for _ in range(15):
        train(workers, spoilt)
    resumed.load_state_dict(workers.state_dict())
    with pytest.raises(RuntimeError, match="16 steps in a row"):
        train(resumed, spoilt)


def test_random_numbers_of_all_kinds_are_restored() -> None:
    workers = make()
    state = workers.state_dict()
    drawn = torch.rand(2), np.random.rand(2), random.random()  # noqa: NPY002
    workers.load_state_dict(state)
    again = torch.rand(2), np.random.rand(2), random.random()  # noqa: NPY002
    assert torch.equal(drawn[0], again[0])
    assert np.array_equal(drawn[1], again[1])
    assert drawn[2] == again[2]


def test_a_state_is_a_copy() -> None:
    workers = make()
    run(workers, range(2))
    state = workers.state_dict()
    weight = state["parameters"]["0.weight"].clone()
    momentum = state["optimizers"][0]["state"][1]["stacked"]["momentum_buffer"].clone()
    run(workers, range(2, 4))
    assert torch.equal(state["parameters"]["0.weight"], weight)
    assert torch.equal(state["optimizers"][0]["state"][1]["stacked"]["momentum_buffer"], momentum)
    workers.load_state_dict(state)
    run(workers, range(2, 4))
    assert torch.equal(state["parameters"]["0.weight"], weight)
    assert torch.equal(state["optimizers"][0]["state"][1]["stacked"]["momentum_buffer"], momentum)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_another_number_of_replicas_starts_from_the_mean_and_says_so(
    world_size: int, tmp_path: Path, warned: list[str]
) -> None:
    workers = make(3, ADAM)
    run(workers, range(3))
    workers.save(tmp_path / "state")
    resumed = make(world_size, ADAM)
    resumed.load(tmp_path / "state")
    saved = workers.state_dict()
    for name, stack in resumed.named_parameters():
        torch.testing.assert_close(stack, saved["parameters"][name].mean(0).expand_as(stack))
    for name, stack in resumed.named_buffers():
        values = saved["buffers"][name]
        mean = values.mean(0) if values.is_floating_point() else values[0]
        torch.testing.assert_close(stack, mean.expand_as(stack))
    first = dict(resumed.named_parameters())["0.weight"]
    momentum = saved["optimizers"][0]["state"][1]["stacked"]["exp_avg"].mean(0)
    torch.testing.assert_close(resumed.optimizer.state[first]["exp_avg"], momentum.expand_as(first))
    assert [f"3 were saved, all {world_size} start from their mean" in each for each in warned] == [True]
    run(resumed, range(3, 5))
    assert resumed.step == 5


@pytest.mark.parametrize("change", [{"compression": "int8"}, {"bucket_cap_mb": 25.0}])
def test_what_was_in_flight_in_other_messages_is_left_out_with_a_warning(
    change: dict[str, Any], warned: list[str]
) -> None:
    workers = make()
    run(workers, range(2))
    resumed = make(**change)
    resumed.load_state_dict(workers.state_dict())
    assert ["not what was in flight" in each for each in warned] == [True]
    for key in ("parameters", "buffers", "rng", "step"):
        assert_equal_states(resumed.state_dict()[key], workers.state_dict()[key])
    run(resumed, range(2, 4))
    assert resumed.step == 4


class Other(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("level", torch.zeros(3))


@pytest.mark.parametrize(
    ("module", "optimizer", "text"),
    [
        (nn.Linear(3, 4), SGD, r"parameter 'weight' of a replica is float32 \[2, 3\] .* but float32 \[4, 3\] here"),
        (nn.Linear(3, 2).double(), SGD, r"parameter 'weight' of a replica is float32 .* but float64 \[2, 3\] here"),
        (nn.Linear(3, 2, bias=False), SGD, r"parameter 'bias' of a replica is float32 \[2\] .* but nothing here"),
        (Other(), SGD, r"buffer 'level' of a replica is nothing in the saved state, but float32 \[3\] here"),
        (nn.Linear(3, 2), ADAM, "SGD with groups of 2 parameters, those here Adam with groups of 2 parameters"),
        (
            nn.Linear(3, 2),
            lambda named: SGD([{"params": named[:1]}, {"params": named[1:]}]),
            "SGD with groups of 2 parameters, those here SGD with groups of 1, 1 parameters",
        ),
        (nn.Linear(3, 2), None, "SGD with groups of 2 parameters, those here none"),
    ],
)
def test_another_models_state_is_refused_by_its_first_difference(module: nn.Module, optimizer: Any, text: str) -> None:
    state = make_workers(nn.Linear(3, 2), 2).state_dict()
    other = make_workers(module, 2, optimizer)
    before = other.state_dict()
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    assert_equal_states(other.state_dict(), before)


def test_a_bare_modules_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not what VirtualWorkers.state_dict\(\) gave"):
        make_workers(nn.Linear(3, 2), 2).load_state_dict(nn.Linear(3, 2).state_dict())


# ---------------------------------------------------------------- files


@pytest.fixture
def saved(tmp_path: Path) -> tuple[VirtualWorkers, Path]:
    workers = make_workers(make_module(), 2)
    train(workers, batch(4))
    workers.save(tmp_path / "state")
    return workers, tmp_path / "state"


def foreign(_: bytes, path: Path) -> None:
    torch.save({"parameters": {}}, path)


DAMAGE = {
    "missing": (lambda _, path: path.unlink(), "cannot be read: No such file"),
    "empty": (lambda _, path: path.write_bytes(b""), "not what VirtualWorkers.save writes, or was truncated"),
    "truncated": (lambda content, path: path.write_bytes(content[:-1]), "or was truncated"),
    "halved": (lambda content, path: path.write_bytes(content[: len(content) // 2]), "or was truncated"),
    "flipped": (
        lambda content, path: path.write_bytes(
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
        ),
        "its SHA-256 differs",
    ),
    "foreign": (foreign, "not what VirtualWorkers.save writes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_and_changes_nothing(kind: str, saved: tuple[VirtualWorkers, Path]) -> None:
    workers, path = saved
    damage, text = DAMAGE[kind]
    damage(path.read_bytes(), path)
    train(workers, batch(4, seed=1))
    before = workers.state_dict()
    with pytest.raises(CheckpointError, match=text):
        workers.load(path)
    assert_equal_states(workers.state_dict(), before)


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_disk_error_leaves_the_old_file(
    fails: str, saved: tuple[VirtualWorkers, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, path = saved
    content = path.read_bytes()
    train(workers, batch(4, seed=1))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, fail)
        with pytest.raises(CheckpointError, match=r"could not be saved: .*No space left.*before is intact"):
            workers.save(path)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["state"]
    workers.save(path)
    assert path.read_bytes() != content


def test_what_cannot_be_saved_leaves_the_old_file(saved: tuple[VirtualWorkers, Path]) -> None:
    workers, path = saved
    content = path.read_bytes()
    workers.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(TypeError, match=r"'note'.* which a checkpoint cannot hold"):
        workers.save(path)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["state"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none/state could not be saved: .*No such file"):
        make_workers(make_module(), 2).save(tmp_path / "none" / "state")
