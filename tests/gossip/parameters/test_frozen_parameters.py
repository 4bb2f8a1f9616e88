"""Parameters that nothing trains are not sent; unfrozen ones are exchanged; edits are told and compared."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpointing import log_of
from covering import covering
from ranks import error_of, on_ranks, run_ranks
from replicas import SGD, gathered
from separate import Separate, mean_square
from small_runs import MODES, finish
from torch import nn

import gossip
from gossip import GossipDataParallel, ManifestError
from gossip.parameters import frozen_parameters

NUM_STEPS, THAW_STEP = 8, 3


def make_module(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    return module


def make_model(**options: Any) -> GossipDataParallel:
    chosen = {"topology": "one_peer_exponential", "timeout": timedelta(seconds=60)} | options
    return GossipDataParallel(make_module(), SGD, **chosen)


def batch(step: int) -> torch.Tensor:
    """Of all ranks together; dealt evenly."""
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def step_of(model: GossipDataParallel, step: int) -> None:
    mean_square(model, batch(step).tensor_split(model.world_size)[model.rank]).backward()
    finish(model)


# ---------------------------------------------------------------- nothing is sent


@pytest.mark.parametrize(("compression", "divisor"), [(None, 1), ("bf16", 4)])
@on_ranks(2)
def test_bytes_per_step_are_those_of_trainable_parameters(compression: str | None, divisor: int) -> None:
    module = make_module()
    places = [parameter.data_ptr() for parameter in (*module[0].parameters(), *module[2].parameters())]
    model = GossipDataParallel(module, SGD, "ring", compression=compression)
    sent, sizes = [], []
    for step in range(5):
        if step == 3:
            module[2].weight.requires_grad_(True)
        step_of(model, step)
        sent.append(model.stats().bytes_sent)  # type: ignore[union-attr]
        sizes.append(sum(each.nbytes for bucket in model._buckets for each in bucket.parameters))
    same = [parameter.data_ptr() for parameter in (*module[0].parameters(), *module[2].parameters())]
    trained = (4 * 2 + 2) * 8
    unfrozen = trained + 8 * 4 * 8
    assert sent == [trained // divisor] * 3 + [unfrozen // divisor] * 2
    assert sizes == [trained] * 3 + [unfrozen] * 2
    stayed = [one == other for one, other in zip(places, same, strict=True)]
    assert stayed == [True, True, False, True]  # frozen ones lie where they lay: there is no second copy


# ---------------------------------------------------------------- unfreezing


def thaw(module: nn.Module, step: int) -> None:
    if step == THAW_STEP:
        module[2].requires_grad_(True)
    if step == THAW_STEP + 2:
        module[0].weight.requires_grad_(True)
    if step == THAW_STEP + 3:
        module[2].bias.requires_grad_(False)  # frozen again: no update of its own, but it is mixed


def unfreezing(mode: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[bool]]:
    model = make_model(**MODES[mode], **options)
    for step in range(NUM_STEPS):
        thaw(model.module, step)
        step_of(model, step)
    model.state_dict()
    values = [parameter.detach().clone() for parameter in model.module.parameters()]
    sent = [each is not None for each in model._engine.exchanges.in_flight]  # type: ignore[union-attr]
    return values, sent


@pytest.mark.parametrize(
    ("mode", "algorithm", "world_size"),
    covering(itertools.product(MODES, ["adapt_while_communicating", "adapt_then_combine"], [3, 4])),
)
def test_unfreezing_in_mid_run_equals_the_dense_recursion(mode: str, algorithm: str, world_size: int) -> None:
    options = {"algorithm": algorithm, "topology": "ring" if world_size == 3 else "one_peer_exponential"}
    found = run_ranks(unfreezing, mode, options, world_size=world_size)
    dense = Separate(
        make_module(), world_size, SGD, options["topology"], combines_first=algorithm == "adapt_then_combine"
    )
    for step in range(NUM_STEPS):
        for module in dense.modules:
            thaw(module, step)
        dense.train(batch(step))
    for (values, sent), module in zip(found, dense.modules, strict=True):
        assert len(sent) == 3
        assert all(sent) or algorithm == "adapt_then_combine"
        for value, wanted in zip(values, module.parameters(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-11)


def test_a_rank_that_is_idle_as_parameters_are_unfrozen_counts_by_its_samples() -> None:
    model = make_model(topology="ring", algorithm=gossip.PushSum(weighted=True))
    model.weigh(8)
    step_of(model, 0)
    model.module[2].requires_grad_(True)
    model.idle_step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    views = model._engine.exchanges.parameter_views()
    assert [view.numbers[model.algorithm.weighs_by].item() for view in views] == [8.0, 8.0]


@on_ranks(2)
def test_ranks_that_unfreeze_different_parameters_are_refused_everywhere() -> None:
    model = make_model(topology="ring")
    step_of(model, 0)
    model.module[2].weight.requires_grad_(True)
    if model.rank == 1:
        model.module[2].bias.requires_grad_(True)
    text = error_of(ManifestError, step_of, model, 1)
    assert "unfrozen is '2.weight' on rank 0, but '2.weight', '2.bias' on rank 1" in text
    assert "unfreeze the same parameters on every rank before the same step" in text


# ---------------------------------------------------------------- edits


def by_operation(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(dist.get_rank())


def by_data(parameter: nn.Parameter) -> None:
    parameter.data.add_(dist.get_rank())


def by_other_memory(parameter: nn.Parameter) -> None:
    for _ in range(2):  # the allocator may give the first address again
        parameter.data = parameter.data + dist.get_rank() / 2


EDITS: dict[str, Callable[[nn.Parameter], None]] = {
    edit.__name__: edit for edit in (by_operation, by_data, by_other_memory)
}


@pytest.mark.parametrize("edit", EDITS)
@on_ranks(3)
@mock.patch.object(frozen_parameters, "digest_of", side_effect=frozen_parameters.digest_of)
def test_an_edit_on_one_rank_is_told_at_the_next_collective_and_compared_there(
    digest_of: mock.Mock, edit: str, tmp_path: Path
) -> None:
    model = make_model(topology="ring")
    weight = model.module[2].weight
    start = make_module()[2].weight.detach()
    for step in range(2):
        step_of(model, step)
        with model.averaged():
            assert torch.equal(weight, start)
    gossip.save(model, tmp_path)
    model.consensus_distance()
    assert not digest_of.called, "what nobody has touched is not hashed"
    if model.rank == 2:
        EDITS[edit](weight)
    mean = start + 2 / 3
    with log_of() as lines, model.averaged():
        torch.testing.assert_close(weight, mean)
    assert sum("now differ between the ranks: '2.weight'" in line for line in lines) == (model.rank == 0)
    assert digest_of.call_count == 1, "of four frozen parameters"
    torch.testing.assert_close(weight, start + (2.0 if model.rank == 2 else 0.0))
    with log_of() as lines, model.averaged():
        torch.testing.assert_close(weight, mean)
    assert not lines, "it is said once"
    step_of(model, 2)
    torch.testing.assert_close(weight, start + (2.0 if model.rank == 2 else 0.0))
    distance, _ = model.consensus_distance()
    trained = [parameter for bucket in model._buckets for parameter in bucket.parameters]
    rows = [gathered(parameter.detach()) for parameter in (*trained, weight)]
    wanted = sum(float((row - row.mean(0)).square().sum()) for row in rows) / model.world_size
    assert distance == pytest.approx(wanted**0.5)
    gossip.export(model, tmp_path / "model.safetensors")
    if model.rank == 0:
        from safetensors.torch import load_file

        torch.testing.assert_close(load_file(tmp_path / "model.safetensors")["2.weight"], mean)
    gossip.save(model, tmp_path)
    model.global_avg()
    torch.testing.assert_close(weight, mean)
    assert torch.equal(gathered(weight.detach()), weight.detach().expand(3, *weight.shape))
    assert digest_of.call_count == 1
    gossip.load(model, tmp_path)
    torch.testing.assert_close(weight, start + (2.0 if model.rank == 2 else 0.0))
    with model.averaged():
        torch.testing.assert_close(weight, mean)
    assert digest_of.call_count == 1, "a checkpoint knows which differ"


@on_ranks(2)
def test_a_frozen_parameter_of_another_dtype_on_one_rank_is_named() -> None:
    model = make_model(topology="ring")
    if model.rank == 1:
        model.module[2].weight.data = model.module[2].weight.data.float()
    text = error_of(ManifestError, model.global_avg)
    assert "frozen parameter '2.weight' is float64 [4, 8]" in text
    assert "but float32 [4, 8]" in text
    assert "on rank 1" in text
