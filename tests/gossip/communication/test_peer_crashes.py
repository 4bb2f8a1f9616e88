"""Failures seen in other trainers of this kind: what crashed, hung, or went on after the model's end.

The table of those that other files hold is in ``test_peer_failures.py``.
"""

from __future__ import annotations

import copy
import functools
import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import (
    MODES,
    assert_rows,
    batch,
    finish,
    flat,
    in_every_mode,
    loss_of,
    make_module,
    rows_after,
    rows_after_combining,
    train,
    wrap,
)
from torch import nn

import topologies
from gossip import GossipDataParallel, ManifestError, launch

# ------------------------------------------------------------------ sizes


def one_rank_per_node() -> None:
    size = dist.get_world_size()
    topology = topologies.build("alternating_exp_ring", size, local_size=1)
    with wrap(topology=topology) as model:
        train(model, range(5))
        assert_rows(model, rows_after(range(5), size, topology=topology))
    with wrap(topology=topology) as model:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(model.rank))
        for _ in range(1 + topology.period):
            model.idle_step()  # the first only sends
        np.testing.assert_allclose(flat(model), (size - 1) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_alternating_exp_ring_with_one_rank_per_node(world_size: int) -> None:
    """One rank per node leaves a group of one, for which there is no communicator: a crash."""
    run_ranks(one_rank_per_node, world_size=world_size)


def every_feature() -> None:
    for name in ("one_peer_exponential", "complete", "ring", "random_matching"):
        for model in in_every_mode(topology=name):
            with model.join():
                train(model, range(2))
            rows = rows_after(range(2), model.world_size, topology=name)
            np.testing.assert_allclose(flat(model), rows[model.rank], rtol=0, atol=1e-12)
            distance = np.sqrt(np.square(rows - rows.mean(0)).sum(1).mean())
            assert model.consensus_distance()[0] == pytest.approx(distance, abs=1e-12)
            with model.averaged():
                np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)
            model.idle_step()
            model.global_avg()
            np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_rank_and_odd_numbers_of_ranks_have_every_feature(world_size: int) -> None:
    """A world of one, and odd sizes, crash or hang."""
    run_ranks(every_feature, world_size=world_size)


# ------------------------------------------------------------------ what a loop may do


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()


def train_in_eval_mode() -> None:
    for model in in_every_mode(normalised):
        assert not model.training
        train(model, range(3))
        assert model.step == 3
        assert_rows(model, rows_after(range(3), model.world_size, make=normalised))
        assert model.module[1].num_batches_tracked == 0
        assert not model.training


def test_model_in_eval_mode_trains() -> None:
    """Training in eval mode, as with a frozen batch norm, crashes or is no training."""
    run_ranks(train_in_eval_mode, world_size=2)


def forward_twice(model: GossipDataParallel) -> None:
    model(batch(model.rank, 7))
    model(batch(model.rank, 8))


def forward_without_gradients(model: GossipDataParallel) -> None:
    guard = torch.inference_mode if model.step % 2 else torch.no_grad
    with guard():
        output = model(batch(model.rank, 7))
    model.state_dict()  # by now all is combined
    assert torch.equal(output, model.module(batch(model.rank, 7))), "computed before the exchange was combined"


def average_twice(model: GossipDataParallel) -> None:
    for _ in range(2):
        with model.averaged():
            pass


def start_in_every_way() -> None:
    for before in (forward_twice, forward_without_gradients, average_twice, GossipDataParallel.zero_grad):
        for model in in_every_mode(algorithm="adapt_then_combine"):
            for step in range(3):
                before(model)
                train(model, range(step, step + 1))
            model.state_dict()
            assert_rows(model, rows_after_combining(3, model.world_size))


def test_unusual_forwards_do_not_lose_what_the_next_forward_must_await() -> None:
    """A forward that no backward follows takes or leaves messages that the next one needs: nothing is trained."""
    run_ranks(start_in_every_way, world_size=3)


def first_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(batch(rank, step))[:, 0].square().mean()


def both_losses(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    output = module(batch(rank, step))
    return output[:, 0].square().mean() + output[:, 1].sin().mean()


def two_backwards() -> None:
    for name, mode in MODES.items():
        with wrap(**mode) as model:
            for step in range(3):
                output = model(batch(model.rank, step))
                with model.no_sync():
                    output[:, 0].square().mean().backward(retain_graph=True)
                output[:, 1].sin().mean().backward()
                finish(model)
            assert model.step == 3
            assert_rows(model, rows_after(range(3), model.world_size, loss=both_losses))
        if name == "outside":
            continue
        with wrap(**mode) as model:  # each by itself: the second needs values that the first has updated
            output = model(batch(model.rank, 0))
            output[:, 0].square().mean().backward(retain_graph=True)
            assert_rows(model, rows_after(range(1), model.world_size, loss=first_loss))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output[:, 1].sin().mean().backward()


def test_two_backwards_per_step_are_one_step_under_no_sync_and_refused_without() -> None:
    """Two backwards per step crash or hang, or the second one takes its gradients at other values."""
    run_ranks(two_backwards, world_size=2)


def more_parameters_on_one_rank(rank: int) -> str:
    module = make_module()
    if dist.get_rank() == rank:
        module.append(nn.Linear(2, 2).double())
    with pytest.raises(ManifestError) as caught:
        wrap(module, optimizer=None)
    with wrap() as model:  # the process is as good as new
        train(model, range(2))
        assert_rows(model, rows_after(range(2), model.world_size))
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_rank_with_more_parameters_than_the_others_is_named(rank: int) -> None:
    """A comparison that zips and truncates lets a rank with more parameters through; then the process aborts."""
    messages = run_ranks(more_parameters_on_one_rank, rank, world_size=3)
    assert len(set(messages)) == 1
    assert "'3.weight' float64 [2, 2]" in messages[0]
    assert "nothing on rank" in messages[0] if rank else "but nothing" in messages[0]


# ------------------------------------------------------------------ the end, and going on from there


def train_and_fail(model: GossipDataParallel) -> None:
    with model:
        train(model, range(2))
        raise ZeroDivisionError


def end_in_every_way() -> None:
    plain = make_module()
    loss_of(plain, 0, 0).backward()
    for mode in MODES.values():
        for how in ("close", "with", "exception", "dropped"):
            module = make_module()
            model = wrap(module, **mode)
            if how == "close":
                train(model, range(2))
                model.close()
            elif how == "with":
                with model:
                    train(model, range(2))
            elif how == "exception":
                with pytest.raises(ZeroDivisionError):
                    train_and_fail(model)
            else:
                train(model, range(2))
            optimizer = model.optimizer
            del model
            gc.collect()
            dist.barrier()  # who is dropped does not wait for what is in flight
            module.load_state_dict(plain.state_dict())
            if dist.get_rank() == 0:  # alone: an exchange would find nobody
                for number in (1, 2):
                    loss_of(module, 0, 0).backward()
                    for parameter, wanted in zip(module.parameters(), plain.parameters(), strict=True):
                        assert torch.equal(parameter, wanted), how
                        torch.testing.assert_close(parameter.grad, number * wanted.grad, rtol=0, atol=1e-15)
                optimizer.step()
                assert not any(
                    torch.equal(p, wanted) for p, wanted in zip(module.parameters(), plain.parameters(), strict=True)
                )
            dist.barrier()


def test_nothing_of_the_wrapper_is_left_in_the_module_after_its_end() -> None:
    """Hooks outlive the wrapper: a later plain backward of the module still steps and communicates."""
    launch(end_in_every_way, world_size=2)


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_exists_and_takes_its_state_before_the_first_forward(mode: str) -> None:
    """No resume: the optimizers do not exist until the second forward."""
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = wrap(optimizer=momentum, **MODES[mode])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.5)
    train(model, range(2))
    scheduler.step()
    saved = copy.deepcopy((model.state_dict(), model.optimizer.state_dict(), scheduler.state_dict()))
    train(model, range(2, 4))

    resumed = wrap(optimizer=momentum, **MODES[mode])
    assert isinstance(resumed.optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(resumed.optimizer, 0.5)
    for each, state in zip((resumed, resumed.optimizer, scheduler), saved, strict=True):
        each.load_state_dict(state)
    train(resumed, range(2, 4))
    for actual, wanted in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, wanted)
