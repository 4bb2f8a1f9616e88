"""The global average: for good, or for a while; and a rank that goes in the middle leaves no sums without its share."""

import contextlib
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import unsupervised
from ranks import on_ranks, run_ranks
from replicas import SGD, TINY_BUCKETS, assert_equal_states, gathered, rank_module, snapshot, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gossip import ExchangeError, GossipDataParallel, GossipError, World
from gossip.communication import staged_collectives


@on_ranks(4)
def test_global_avg_makes_all_ranks_equal_and_drops_what_was_in_flight() -> None:
    model = GossipDataParallel(rank_module(), SGD, "one_peer_exponential", bucket_cap_mb=TINY_BUCKETS)
    train(model, range(5))
    with torch.no_grad():
        model.module.level.fill_(model.rank)
        model.module.mask.fill_(model.rank == 0)
    before = {name: gathered(tensor) for name, tensor in snapshot(model).items()}
    model.global_avg()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, before[name].double().mean(0).to(tensor.dtype))
        else:
            assert torch.equal(tensor, before[name][0]), name
        assert torch.equal(gathered(tensor), tensor.expand(model.world_size, *tensor.shape)), name
    assert max(model.consensus_distance()) < 1e-6
    assert model.step == 5
    # What was in flight before is gone: the next step starts from the average, everywhere.
    average = snapshot(model)
    train(model, range(5, 6))
    model.close()
    plain = rank_module()
    plain.load_state_dict(average)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            update = 0.1 * model.optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(parameter, plain.get_parameter(name) - update)


def train_and_look(look: bool) -> dict[str, torch.Tensor]:
    model = GossipDataParallel(rank_module(), SGD, "exponential", bucket_cap_mb=TINY_BUCKETS)
    for step in range(6):
        train(model, range(step, step + 1))
        if look:
            before = snapshot(model)
            rows = gathered(model.module.first.weight)
            with model.averaged():
                torch.testing.assert_close(model.module.first.weight, rows.mean(0))
                model.eval()
                model(torch.ones(2, 4))
                model.train()
            assert_equal_states(snapshot(model), before)
            with pytest.raises(ZeroDivisionError), model.averaged():
                raise ZeroDivisionError
            assert_equal_states(snapshot(model), before)
            model.consensus_distance()
    return snapshot(model)


def test_averaged_restores_everything_and_training_goes_on_bit_for_bit() -> None:
    looked, unseen = run_ranks(train_and_look, True, world_size=5), run_ranks(train_and_look, False, world_size=5)
    assert_equal_states(looked, unseen)


class Clones(TorchDispatchMode):
    """Counts the copies that are made."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compression", [None, "int8"])
@pytest.mark.parametrize("on_peer_loss", ["raise", "continue"])
@on_ranks(2)
def test_averaged_copies_no_values_that_are_in_flight_as_they_are(on_peer_loss: str, compression: str | None) -> None:
    module = nn.Linear(300, 300, bias=False)
    model = GossipDataParallel(module, SGD, "ring", compression=compression, on_peer_loss=on_peer_loss)
    model(torch.ones(1, 300)).sum().backward()
    before = module.weight.detach().clone()
    with Clones() as clones, model.averaged():
        pass
    assert torch.equal(module.weight, before)
    with torch.no_grad():
        module.weight[0] = -module.weight[0]
    before = module.weight.detach().clone()
    with Clones() as of_changed, model.averaged():
        pass
    assert torch.equal(module.weight, before)
    assert clones.num == of_changed.num - (compression is None)


@on_ranks(2)
def test_averaged_refuses_training_inside() -> None:
    model = GossipDataParallel(rank_module(), SGD, "ring")
    train(model, range(1))
    with model.averaged():
        loss = model(torch.ones(2, 4)).sum()
        for refused in (loss.backward, model.global_avg, model.idle_step):
            with pytest.raises(GossipError, match="leave the block first"):
                refused()


NUM_SUMS = 9
"""Of a global average of the module: one for each of 5 buckets and 3 float buffers, and the confirmation."""


class DepartedError(Exception):
    """A rank leaves."""


def leave_before(world: World, number: int) -> None:
    """Leave before the sum over ranks of this number, as far as the others can see without a word."""
    numbers = iter(range(1000))
    sum_ = world.sum_

    def sum_or_leave(tensor: torch.Tensor, what: str) -> None:
        if next(numbers) == number:
            raise DepartedError
        sum_(tensor, what)

    world.sum_ = sum_or_leave  # type: ignore[method-assign]


def average_while_one_leaves(number: int, staging_bytes: int, how: str) -> tuple[int, int, str]:
    """How many values of those that differ have changed, of how many, and the error."""
    staged_collectives.STAGING_BYTES = staging_bytes
    model = GossipDataParallel(
        rank_module(), SGD, "exponential", bucket_cap_mb=TINY_BUCKETS, timeout=timedelta(seconds=30)
    )
    train(model, range(3))
    with torch.no_grad():
        model.module.mask.fill_(model.rank == 0)
    before = snapshot(model)
    rows = {name: gathered(values) for name, values in before.items()}
    if model.rank == 2:
        leave_before(model._world, number)
        with pytest.raises(DepartedError):
            model.global_avg()
        model.close()
        return 0, 0, "left"
    with pytest.raises(ExchangeError) as caught:
        model.global_avg() if how == "global_avg" else model.averaged().__enter__()
    if how == "averaged":
        assert_equal_states(snapshot(model), before)
    num_changed = num_values = 0
    for name, values in model.module.state_dict().items():
        mean = rows[name].double().mean(0).to(values.dtype) if values.is_floating_point() else rows[name][0]
        is_own = values == before[name]
        assert (is_own | values.isclose(mean, rtol=1e-5, atol=1e-6)).all(), name
        num_changed += int((~is_own).sum())
        num_values += values.numel()
    return num_changed, num_values, str(caught.value)


Torn = dict[tuple[int, int, str], list[tuple[int, int, str]]]
CASES = [
    *((number, staged_collectives.STAGING_BYTES, "global_avg") for number in (0, 3, NUM_SUMS - 1)),
    (6, 128, "global_avg"),
    (6, 128, "averaged"),
]


@pytest.fixture(scope="module")
def torn() -> Torn:
    """By case, what is found on each rank; all at the same time, as most of it is waiting."""
    with contextlib.ExitStack() as stack:
        worlds = {
            case: stack.enter_context(unsupervised.started(average_while_one_leaves, *case, world_size=3))
            for case in CASES
        }
        return {case: ranks.results() for case, ranks in worlds.items()}


@pytest.mark.parametrize("case", CASES)
def test_average_that_fails_leaves_what_was_before_or_means_and_own_values_only(
    torn: Torn, case: tuple[int, int, str]
) -> None:
    """With room for 32 values a piece, the third sum comes after the first pieces were assigned."""
    for num_changed, num_values, text in torn[case][:2]:  # the third rank is the one that leaves
        if case == (6, 128, "global_avg"):
            assert 0 < num_changed < num_values
            assert "values of parameters and buffers are the mean, all others its own" in text
        else:
            assert num_changed == 0 < num_values
            assert text.endswith("; on this rank parameters and buffers are as they were before")


@on_ranks(3)
def test_average_in_pieces_has_the_bits_of_the_whole() -> None:
    for dtype, numel, staging_bytes in (
        (torch.float32, 1, 2**13),
        (torch.float32, 12345, 2**13),
        (torch.float32, 2_000_003, 2**20),
        (torch.float64, 1234, 2**12),
        (torch.bfloat16, 12345, 2**13),
    ):
        module = nn.ParameterList([torch.empty(numel, dtype=dtype)])
        model = GossipDataParallel(module, None, "complete")
        with torch.no_grad():
            module[0].copy_(torch.randn(numel, generator=torch.Generator().manual_seed(model.rank)))
        whole = model._buckets[0].block.to(torch.promote_types(dtype, torch.float32), copy=True)
        model._world.average_(whole, "averaging as a whole")
        with mock.patch.object(staged_collectives, "STAGING_BYTES", staging_bytes):
            model.global_avg()
        assert torch.equal(module[0], whole[:numel].to(dtype))
