"""The global average: for good, or for a while with everything put back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks
from replicas import (
    SGD,
    TINY_BUCKETS,
    assert_equal_states,
    gathered,
    rank_module,
    snapshot,
    train,
)

from gossip import GossipDataParallel, GossipError


def check_global_average() -> None:
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


def test_global_avg_makes_all_ranks_equal_and_drops_what_was_in_flight() -> None:
    run_ranks(check_global_average, world_size=4)


def train_and_look(look: bool) -> dict[str, np.ndarray]:
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
    state = {name: tensor.float().numpy() for name, tensor in snapshot(model).items()}
    model.close()
    return state


def test_averaged_restores_everything_and_training_goes_on_bit_for_bit() -> None:
    looked, unseen = run_ranks(train_and_look, True, world_size=5), run_ranks(train_and_look, False, world_size=5)
    for with_look, without in zip(looked, unseen, strict=True):
        for name in without:
            assert np.array_equal(with_look[name], without[name]), name


def check_no_training_inside_averaged() -> None:
    model = GossipDataParallel(rank_module(), SGD, "ring")
    train(model, range(1))
    with model.averaged():
        loss = model(torch.ones(2, 4)).sum()
        for refused in (loss.backward, model.global_avg, model.idle_step):
            with pytest.raises(GossipError, match="leave the block first"):
                refused()


def test_averaged_refuses_training_inside() -> None:
    run_ranks(check_no_training_inside_averaged, world_size=2)
