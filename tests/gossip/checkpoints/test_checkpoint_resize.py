"""A checkpoint in another world, or of another model."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import ADAMW, DroppingNet, assert_same, everything, log_of, make_model, one_step
from ranks import on_ranks, run_ranks
from replicas import SGD
from torch import nn

import gossip
from gossip import CheckpointError
from gossip.checkpoints.resizing import mean_state

STEP = 4


def save_some_steps(folder: str, world: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = make_model(**options)
    for _ in range(STEP):
        one_step(model)
    with torch.no_grad():
        model.module.mask.fill_(model.rank == 1)  # a boolean buffer: rank 0's counts
        model.module.level.fill_(model.rank)
        for state in model.optimizer.state.values():
            if "step" in state:  # a rank whose parameter had no gradient for a while
                state["step"] += model.rank
    gossip.save(model, f"{folder}/{world}", rank=model.rank)
    return everything(model)


def load_here(folder: str, world: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = make_model(seed=9, **options)
    one_step(model)
    random_state = torch.get_rng_state()
    with log_of() as lines:
        checkpoint = gossip.load(model, f"{folder}/{world}")
    assert (checkpoint.step, checkpoint.world_size, checkpoint.data) == (STEP, world, {"rank": 0})
    assert torch.equal(torch.get_rng_state(), random_state)
    assert len(lines) == (model.rank == 0)
    state = everything(model)
    for _ in range(3):
        one_step(model)
    assert model.step == STEP + 3
    path = gossip.save(model, f"{folder}/{world}")
    gossip.load(model, path)
    assert max(model.consensus_distance()) > 0 or model.world_size == 1
    return state, lines


@pytest.mark.parametrize(("old", "new"), [(3, 4), (2, 1), (1, 2)])
def test_another_world_size_starts_from_the_mean(old: int, new: int, tmp_path: Path) -> None:
    options = {"topology": "exponential", "optimizer": SGD if old == 3 else ADAMW}
    saved = run_ranks(save_some_steps, str(tmp_path), old, options, world_size=old)
    loaded = run_ranks(load_here, str(tmp_path), old, options, world_size=new)
    for state, _ in loaded:
        assert state.keys() == saved[0].keys()
        for name, tensor in state.items():
            rows = torch.stack([rank[name] for rank in saved])
            if tensor.is_floating_point() and not name.endswith(" step"):
                torch.testing.assert_close(tensor, rows.double().mean(0).to(tensor.dtype))
                # Nothing trains the one, and batch norm takes away what the other adds.
                assert not torch.equal(rows[0], rows[-1]) or old == 1 or name in ("frozen", "first.bias")
            else:
                assert torch.equal(tensor, rows[0]), name
        assert_same(state, loaded[0][0])
    line = loaded[0][1][0]
    assert f"there were {old} and are now {new}, which all start from the mean" in line
    assert "random number generators" in line


def half_a_state(step: int, momentum: float, numbers: tuple[int, ...]) -> dict[str, Any]:
    entries = {
        number: {
            "step": torch.tensor(float(step)),
            "count": torch.tensor([step]),
            "nested": [torch.full((2,), momentum, dtype=torch.bfloat16), (torch.tensor(1j * momentum), "text")],
        }
        for number in numbers
    }
    groups = [{"params": [0, 1], "lr": torch.tensor(momentum)}]
    return {
        "parameters": {"step": torch.tensor(momentum)},  # a name like any other there
        "buffers": {},
        "optimizers": [{"state": entries, "param_groups": groups}],
        "engine": {"step": step, "exchanges": {"in_flight": [None], "codecs": [{}]}},
    }


def test_mean_goes_through_nested_state_and_state_that_some_ranks_lack() -> None:
    mean = mean_state(iter([half_a_state(1, 1.0, (0,)), half_a_state(2, 3.0, (0, 1))]))
    assert mean["parameters"]["step"] == 2
    assert mean["engine"] == {"step": 1}
    optimizer = mean["optimizers"][0]
    assert optimizer["param_groups"][0]["lr"] == 1
    for number, (step, momentum) in {0: (1, 2.0), 1: (2, 3.0)}.items():
        entry = optimizer["state"][number]
        assert (entry["step"], entry["count"]) == (step, step)
        assert entry["nested"][0].dtype == torch.bfloat16
        assert entry["nested"][0].tolist() == [momentum] * 2
        assert (entry["nested"][1][0].item(), entry["nested"][1][1]) == (momentum * 1j, "text")
    wrong = half_a_state(2, 3.0, (0,))
    wrong["parameters"]["step"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"rank 1 does not match rank 0's: shape \[3\] differs from \[\]"):
        mean_state([half_a_state(1, 1.0, (0,)), wrong])


def test_weights_are_not_rounded_as_the_parameters_are() -> None:
    algorithm = {"keeps": {}, "weighs_by": "weight", "kept": {}, "numbers": {"weight": torch.tensor([257.0])}}
    state: dict[str, Any] = {"buffers": {}, "optimizers": [], "engine": {"step": 1, "algorithm": algorithm}}
    values = torch.tensor([1.0, -3.0], dtype=torch.bfloat16)
    mean = mean_state([state | {"parameters": {"x": values}} for _ in range(3)])
    assert torch.equal(mean["parameters"]["x"], values)
    assert mean["parameters"]["x"].dtype == torch.bfloat16


@on_ranks(3)
def test_other_buckets_or_topology_drop_what_was_in_flight(tmp_path: Path) -> None:
    model = make_model(topology="ring")
    for _ in range(STEP):
        one_step(model)
    gossip.save(model, tmp_path)
    wanted = everything(model)
    for options, reason in (
        ({"bucket_cap_mb": 25.0}, "the messages in flight: the buckets differ"),
        ({"topology": "complete"}, "the messages in flight: the topology differs"),
    ):
        other = make_model(seed=2, **({"topology": "ring"} | options))
        one_step(other)
        with log_of() as lines:
            gossip.load(other, tmp_path)
        assert len(lines) == (other.rank == 0)
        assert all(reason in line for line in lines)
        assert_same(everything(other), wanted)
        state = other._engine.state_dict()
        assert state["step"] == STEP
        assert state["exchanges"]["in_flight"] == [None] * len(other._buckets)
        one_step(other)


class Wider(DroppingNet):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)


class DoubleBuffer(DroppingNet):
    def __init__(self) -> None:
        super().__init__()
        self.level = self.level.double()


MISFITS = {
    "parameter": ({"module": Wider}, r"parameter 'first\.bias' is float32 \[6\] in the checkpoint, but nothing here"),
    "dtype": ({"module": DoubleBuffer}, r"buffer 'level' is bfloat16 \[5\] in the checkpoint, but float64 \[5\] here"),
    "type": ({"optimizer": functools.partial(torch.optim.Adam)}, "optimizer is AdamW in the checkpoint, but Adam here"),
    "order": (
        {"optimizer": lambda named: torch.optim.AdamW(named[::-1])},
        r"optimizer, group 1, parameter 1 is 'frozen' in the checkpoint, but 'narrow\.bias' here",
    ),
}


@on_ranks(2)
def test_another_model_is_refused_naming_the_first_difference(tmp_path: Path) -> None:
    gossip.save(make_model(), tmp_path)
    for options, reason in MISFITS.values():
        model = make_model(seed=1, **options)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=f"does not fit: .*{reason}"):
            gossip.load(model, tmp_path)
        assert_same(model.state_dict(), before)
        one_step(model)  # the ranks are still in step
