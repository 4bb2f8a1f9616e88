"""Parameters that nothing trains are not sent; unfrozen ones are exchanged; edits are told and compared."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpointing import assert_same, everything, log_of
from covering import covering
from ranks import run_ranks
from replicas import gathered
from separate import Separate, mean_square
from small_runs import MODES, finish
from torch import nn

import gossip
from gossip import ExchangeError, GossipDataParallel, GossipError, ManifestError
from gossip.parameters import frozen_parameters

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
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


def bytes_per_step(compression: str | None) -> tuple[list[int], list[int], list[int]]:
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
    model.close()
    return sent, sizes, [one == other for one, other in zip(places, same, strict=True)]


@pytest.mark.parametrize(("compression", "divisor"), [(None, 1), ("bf16", 4)])
def test_bytes_per_step_are_those_of_trainable_parameters(compression: str | None, divisor: int) -> None:
    trained = (4 * 2 + 2) * 8
    unfrozen = trained + 8 * 4 * 8
    for sent, sizes, stayed in run_ranks(bytes_per_step, compression, world_size=2):
        assert sent == [trained // divisor] * 3 + [unfrozen // divisor] * 2
        assert sizes == [trained] * 3 + [unfrozen] * 2
        assert stayed == [True, True, False, True]  # frozen ones lie where they lay: there is no second copy


def starts() -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    shapes = [(3,), (5, 2), (0, 3), (), (700,), (2, 3, 4, 4)]
    module = nn.ParameterList([nn.Parameter(torch.randn(shape), requires_grad=False) for shape in shapes])
    module.append(nn.Parameter(torch.randn(6, 5).t()[1:4], requires_grad=False))
    module.append(nn.Parameter(torch.randn(7).bfloat16(), requires_grad=False))
    module.append(nn.Parameter(torch.ones(2)))
    model = GossipDataParallel(module, SGD, bucket_cap_mb=500 / 2**20)
    model.close()
    return [parameter.detach() for parameter in module]


def test_frozen_parameters_start_with_rank_0s_values() -> None:
    first, second, third = run_ranks(starts, world_size=3)
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.randn(3))
    for one, other, another in zip(first, second, third, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, another)


# ---------------------------------------------------------------- unfreezing


def unfreezing(mode: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[bool]]:
    model = make_model(**MODES[mode], **options)
    for step in range(NUM_STEPS):
        if step == THAW_STEP:
            model.module[2].requires_grad_(True)
        if step == THAW_STEP + 2:
            model.module[0].weight.requires_grad_(True)
        if step == THAW_STEP + 3:
            model.module[2].bias.requires_grad_(False)  # frozen again: no update of its own, but it is mixed
        step_of(model, step)
    model.state_dict()
    values = [parameter.detach().clone() for parameter in model.module.parameters()]
    sent = [each is not None for each in model._engine.exchanges.in_flight]  # type: ignore[union-attr]
    model.close()
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
            if step == THAW_STEP:
                module[2].requires_grad_(True)
            if step == THAW_STEP + 2:
                module[0].weight.requires_grad_(True)
            if step == THAW_STEP + 3:
                module[2].bias.requires_grad_(False)
        dense.train(batch(step))
    for (values, sent), module in zip(found, dense.modules, strict=True):
        assert len(sent) == 3
        assert all(sent) or algorithm == "adapt_then_combine"
        for value, wanted in zip(values, module.parameters(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-11)


def unfreezing_what_the_others_do_not() -> str:
    model = make_model(topology="ring")
    step_of(model, 0)
    model.module[2].weight.requires_grad_(True)
    if model.rank == 1:
        model.module[2].bias.requires_grad_(True)
    with pytest.raises(ManifestError) as caught:
        step_of(model, 1)
    return str(caught.value)


def test_ranks_that_unfreeze_different_parameters_are_refused_everywhere() -> None:
    for text in run_ranks(unfreezing_what_the_others_do_not, world_size=2):
        assert "unfrozen is '2.weight' on rank 0, but '2.weight', '2.bias' on rank 1" in text
        assert "unfreeze the same parameters on every rank before the same step" in text


def unfreezing_alone() -> str:
    model = make_model(topology="ring", timeout=timedelta(seconds=2))
    step_of(model, 0)
    if model.rank == 1:
        model.module[2].requires_grad_(True)
    steps = iter(range(1, 4))
    with pytest.raises(ExchangeError) as caught:
        all(step_of(model, step) is None for step in steps)
    return str(caught.value)


def test_a_rank_that_unfreezes_alone_says_what_it_waited_for() -> None:
    texts = run_ranks(unfreezing_alone, world_size=3)
    assert "step 1: comparing the parameters that were unfrozen (unfreeze the same" in texts[1]


def unfreezing_inside_join() -> None:
    model = make_model()
    model.module[2].requires_grad_(True)
    with pytest.raises(GossipError, match=r"parameter '2\.weight' was unfrozen inside join\(\)"), model.join():
        step_of(model, 0)


def test_unfreezing_inside_join_is_refused() -> None:
    run_ranks(unfreezing_inside_join, world_size=2)


def unfreezing_on_idle_ranks() -> torch.Tensor:
    model = make_model(topology="complete", algorithm="adapt_then_combine")
    for step in range(3):
        if step == 1:
            model.module[2].weight.requires_grad_(True)
        if model.rank == 0:
            step_of(model, step)
        else:
            model.idle_step()
    model.state_dict()
    values = model.module[2].weight.detach().clone()
    model.close()
    return values


def test_an_idle_rank_takes_part_in_unfreezing() -> None:
    first, second = run_ranks(unfreezing_on_idle_ranks, world_size=2)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-15)
    assert not torch.equal(first, make_module()[2].weight)


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


def editing(edit: str, folder: str) -> None:
    num_hashed: list[int] = []
    digest_of = frozen_parameters.digest_of
    with mock.patch.object(
        frozen_parameters, "digest_of", lambda tensors: (num_hashed.append(1), digest_of(tensors))[1]
    ):
        edit_on_one_rank(EDITS[edit], folder, num_hashed)


def edit_on_one_rank(edit: Callable[[nn.Parameter], None], folder: str, num_hashed: list[int]) -> None:
    model = make_model(topology="ring")
    weight = model.module[2].weight
    start = make_module()[2].weight.detach()
    for step in range(2):
        step_of(model, step)
        with model.averaged():
            assert torch.equal(weight, start)
    gossip.save(model, folder)
    model.consensus_distance()
    assert not num_hashed, "what nobody has touched is not hashed"
    if model.rank == 2:
        edit(weight)
    mean = start + 2 / 3
    with log_of() as lines, model.averaged():
        torch.testing.assert_close(weight, mean)
    assert sum("now differ between the ranks: '2.weight'" in line for line in lines) == (model.rank == 0)
    assert num_hashed == [1], "of four frozen parameters"
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
    gossip.export(model, f"{folder}/model.safetensors")
    if model.rank == 0:
        from safetensors.torch import load_file

        torch.testing.assert_close(load_file(f"{folder}/model.safetensors")["2.weight"], mean)
    gossip.save(model, folder)
    model.global_avg()
    torch.testing.assert_close(weight, mean)
    assert torch.equal(gathered(weight.detach()), weight.detach().expand(3, *weight.shape))
    assert num_hashed == [1]
    gossip.load(model, folder)
    torch.testing.assert_close(weight, start + (2.0 if model.rank == 2 else 0.0))
    with model.averaged():
        torch.testing.assert_close(weight, mean)
    assert num_hashed == [1], "a checkpoint knows which differ"
    model.close()


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_on_one_rank_is_told_at_the_next_collective_and_compared_there(edit: str, tmp_path: Path) -> None:
    run_ranks(editing, edit, str(tmp_path), world_size=3)


def editing_alike() -> None:
    model = make_model(topology="ring")
    with torch.no_grad():
        model.module[2].weight.mul_(2)
    wanted = 2 * make_module()[2].weight.detach()
    with log_of() as lines, model.averaged():
        assert torch.equal(model.module[2].weight, wanted)
    assert not lines
    assert model._engine.frozen.differing == []  # type: ignore[union-attr]
    model.close()


def test_the_same_edit_on_all_ranks_leaves_a_parameter_equal() -> None:
    run_ranks(editing_alike, world_size=2)


def editing_one_after_the_other() -> None:
    model = make_model(topology="ring")
    start = make_module()[2].weight.detach()
    with torch.no_grad():
        model.module[2].weight.add_(model.rank)
    model.consensus_distance()
    with torch.no_grad():
        model.module[0].weight.mul_(2)  # alike
    with model.averaged():
        torch.testing.assert_close(model.module[2].weight.detach(), start + 0.5)
    assert model._engine.frozen.differing == ["2.weight"]  # type: ignore[union-attr]
    model.close()


def test_a_parameter_that_differs_does_so_whatever_is_written_next() -> None:
    run_ranks(editing_one_after_the_other, world_size=2)


def converting_on_one_rank() -> str:
    model = make_model(topology="ring")
    if model.rank == 1:
        model.module[2].weight.data = model.module[2].weight.data.float()
    with pytest.raises(ManifestError) as caught:
        model.global_avg()
    return str(caught.value)


def test_a_frozen_parameter_of_another_dtype_on_one_rank_is_named() -> None:
    for text in run_ranks(converting_on_one_rank, world_size=2):
        assert "frozen parameter '2.weight' is float64 [4, 8]" in text
        assert "but float32 [4, 8]" in text
        assert "on rank 1" in text


# ---------------------------------------------------------------- checkpoints


def thaw(model: GossipDataParallel, step: int) -> None:
    if step >= THAW_STEP:
        model.module[2].requires_grad_(True)
    if step >= THAW_STEP + 1:
        model.module[0].bias.requires_grad_(True)


def interrupted(folder: str, options: dict[str, Any]) -> None:
    undisturbed = make_model(**options)
    for step in range(NUM_STEPS):
        thaw(undisturbed, step)
        step_of(undisturbed, step)
        if step == THAW_STEP + 1:
            gossip.save(undisturbed, folder)
    wanted = everything(undisturbed)
    undisturbed.close()
    resumed = make_model(**options)
    with log_of() as lines:
        gossip.load(resumed, folder)
    assert not lines, "nothing was dropped"
    for step in range(resumed.step, NUM_STEPS):
        thaw(resumed, step)
        step_of(resumed, step)
    assert_same(everything(resumed), wanted)
    resumed.close()


@pytest.mark.parametrize(
    "options",
    [{"algorithm": "adapt_then_combine"}, {"compression": "choco", "topology": "ring"}, {"bucket_cap_mb": 2e-4}],
    ids=str,
)
def test_a_run_that_unfroze_resumes_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(interrupted, str(tmp_path), options, world_size=3)


# ---------------------------------------------------------------- virtual workers


def thaw_stacks(workers: gossip.VirtualWorkers, step: int) -> None:
    for name, stack in workers.named_parameters():
        if (name.startswith("2.") and step >= THAW_STEP) or (name == "0.bias" and step >= THAW_STEP + 1):
            stack.requires_grad_(True)


def unfreezing_real(compression: str | None) -> tuple[list[torch.Tensor], list[int]]:
    model = make_model(topology="ring", compression=compression, bucket_cap_mb=1e-4)
    sent = []
    for step in range(NUM_STEPS):
        thaw(model, step)
        step_of(model, step)
        sent.append(model.stats().bytes_sent)  # type: ignore[union-attr]
    values = [parameter.detach().clone() for parameter in model.module.parameters()]
    model.close()
    return values, sent


@pytest.mark.parametrize("compression", [None, "choco"])
def test_virtual_workers_unfreeze_as_processes_do(compression: str | None, tmp_path: Path) -> None:
    found = run_ranks(unfreezing_real, compression, world_size=4)
    options = {"compression": compression, "bucket_cap_mb": 1e-4, "devices": ["cpu", "cpu"]}
    workers = gossip.VirtualWorkers(make_module(), 4, SGD, "ring", **options)
    resumed = gossip.VirtualWorkers(make_module(), 4, SGD, "ring", **options)
    for step in range(NUM_STEPS):
        thaw_stacks(workers, step)
        mean_square(workers, batch(step)).backward()
        if compression is None:  # else some of a step's bytes follow in the next one
            assert workers.stats().bytes_sent == sum(sent[step] for _, sent in found) / 4  # type: ignore[union-attr]
        if step == THAW_STEP + 1:
            gossip.save(workers, tmp_path)
            gossip.load(resumed, tmp_path)
        if step > THAW_STEP + 1:
            thaw_stacks(resumed, step)
            mean_square(resumed, batch(step)).backward()
    for rank, (values, _) in enumerate(found):
        both = zip(workers.replica(rank).parameters(), resumed.replica(rank).parameters(), strict=True)
        for value, (parameter, again) in zip(values, both, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-11, atol=1e-11)
            assert torch.equal(parameter, again)


def test_frozen_stacks_are_not_mixed_but_averaged() -> None:
    workers = gossip.VirtualWorkers(make_module(), 2, SGD, "complete", devices=["cpu"])
    stack = dict(workers.named_parameters())["2.weight"]
    with torch.no_grad():
        stack[1] += 1
    before = stack.detach().clone()
    for step in range(2):
        mean_square(workers, batch(step)).backward()
    assert torch.equal(stack, before)
    with workers.averaged() as module:
        torch.testing.assert_close(module[2].weight, before.mean(0))  # type: ignore[index]
