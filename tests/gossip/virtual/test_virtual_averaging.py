"""The mean of virtual workers, and each replica by itself."""

from __future__ import annotations

import pytest
import torch
from separate import Separate, assert_same, batch, make_module, make_workers, train

from gossip import GossipError


def test_averaged_is_the_mean_and_changes_nothing() -> None:
    workers, untouched = (make_workers(make_module(), 3) for _ in range(2))
    for step in range(6):
        for each in (workers, untouched):
            train(each, batch(6, seed=step))
        replicas = [workers.replica(rank) for rank in range(3)]
        with workers.averaged() as module:
            for name, parameter in module.named_parameters():
                mean = torch.stack([each.get_parameter(name) for each in replicas]).mean(0)
                torch.testing.assert_close(parameter, mean)
            assert torch.equal(workers(batch(4)), module(batch(4)))
    for one, other in zip(workers.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_inside_averaged_nothing_is_trained() -> None:
    workers = make_workers(make_module(), 3)
    loss = workers(batch(6)).square().mean()
    with workers.averaged():
        with pytest.raises(GossipError, match=r"inside averaged\(\)"):
            loss.backward()
        with pytest.raises(GossipError, match=r"inside averaged\(\)"):
            workers.idle_step()
        workers.module(batch(6)).sum().backward()
    assert workers.step == 0
    train(workers, batch(6))
    assert workers.step == 1


def test_global_avg_makes_replicas_equal_and_drops_what_is_in_flight() -> None:
    module = make_module()
    workers, separate = make_workers(module, 3, topology="ring"), Separate(module, 3, topology="ring")
    train(workers, batch(6))
    separate.train(batch(6))
    workers.global_avg()
    assert workers.consensus_distance() == (0.0, 0.0)
    for own in zip(*(each.parameters() for each in separate.modules), strict=True):
        mean = torch.stack([each.detach() for each in own]).mean(0)
        for each in own:
            each.data.copy_(mean)
    assert_same(workers, separate)
    for one, other in zip(workers.module.parameters(), workers.replica(2).parameters(), strict=True):
        assert torch.equal(one, other)
    train(workers, batch(6, seed=1))
    separate.train(batch(6, seed=1))  # replicas are equal: mixing them changes nothing
    assert_same(workers, separate)
    assert workers.step == 2
