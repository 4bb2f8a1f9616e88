"""Loops that people write, in every mode: what trains wrongly, crashes or hangs in other trainers of this kind."""

import copy
import gc
from datetime import timedelta

import numpy as np
import pytest
import small_runs
import torch
import torch.distributed as dist
from ranks import on_ranks
from small_runs import assert_rows, batch, flat, in_every_mode, loss_of, make_module, rows_after, train, wrap
from torch import nn

from gossip import ExchangeError, GossipDataParallel, GossipError

# ------------------------------------------------------------------ what comes before a step and leaves no trace


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


def drop_gradients(model: GossipDataParallel) -> None:
    for zeroed in (model, model.module, model.optimizer):
        zeroed.zero_grad()


def swap_values_in_and_out(model: GossipDataParallel) -> None:
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: 0.5 * value for name, value in kept.items()})
    with torch.no_grad():
        halved = model(batch(model.rank, 9))
    model.load_state_dict(kept)
    assert not torch.equal(halved, model.module(batch(model.rank, 9)))


@pytest.mark.parametrize("algorithm", ["adapt_while_communicating", "adapt_then_combine"])
@on_ranks(3)
def test_what_comes_before_a_step_and_leaves_no_trace(algorithm: str) -> None:
    """Elsewhere nothing is trained after it, an update or an exchange is lost, or what was put back is overwritten."""
    for before in (forward_twice, forward_without_gradients, average_twice, drop_gradients, swap_values_in_and_out):
        for model in in_every_mode(algorithm=algorithm):
            for step in range(3):
                before(model)
                train(model, range(step, step + 1))
            model.state_dict()
            combines_first = algorithm == "adapt_then_combine"
            assert_rows(model, rows_after(range(3), model.world_size, combines_first=combines_first))


# ------------------------------------------------------------------ what does leave a trace


def edited(rank: int, step: int, x: np.ndarray) -> np.ndarray:
    """Clamped before steps 1 to 3, loaded from elsewhere before step 4."""
    return np.full_like(x, 0.1 * (rank + 1)) if step == 4 else x.clip(-0.2, 0.2) if step else x


@on_ranks(3)
def test_edits_and_global_averages_between_steps_are_trained_on() -> None:
    for model in in_every_mode():
        for step in range(6):
            if step == 4:
                values = {name: torch.full_like(p, 0.1 * (model.rank + 1)) for name, p in model.named_parameters()}
                model.load_state_dict(values)
            elif step:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.clamp_(-0.2, 0.2)
            train(model, range(step, step + 1))
        assert_rows(model, rows_after(range(6), model.world_size, edit=edited))
    for early in range(3):  # before the first forward, before the second, before the third
        for model in in_every_mode():
            train(model, range(early))
            rows = rows_after(range(early), model.world_size)
            for _ in range(2):
                model.global_avg()
                np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)
            assert model.step == early
            train(model, range(early, early + 3))
            assert_rows(model, rows_after(range(early, early + 3), model.world_size, start=rows.mean(0)))


# ------------------------------------------------------------------ parts that are not always used


def late_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Part 1 is used from step 1 on, part 2 from step 2 on by rank 0 only, part 3 never."""
    chosen = (0, 1, 2) if step >= 2 and rank == 0 else (0, 1) if step else (0,)
    return module(batch(rank, step), chosen).square().mean()


def dynamic_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Another order in every step, other parts on every rank, and a part that is used twice."""
    chosen = ((0, 1, 2), (2, 1, 0), (rank, 3), (1, 1), (3, 2, rank))[step]
    return module(batch(rank, step), chosen).square().mean()


@on_ranks(3)
def test_parts_unused_at_first_or_used_in_another_order_are_trained_and_mixed() -> None:
    for loss in (late_loss, dynamic_loss):
        for model in in_every_mode(small_runs.Branches):
            for step in range(5):
                train(model, range(step, step + 1), loss)
                assert all(parameter.grad is None for parameter in model.parameters()), "a gradient is left over"
                assert_rows(model, rows_after(range(step + 1), model.world_size, make=small_runs.Branches, loss=loss))


@pytest.mark.parametrize("outside", [False, True])
@on_ranks(2)
def test_overflow_in_any_one_bucket_skips_the_update_of_all(outside: bool) -> None:
    def skipping_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(module, rank, step) * ((rank, step) not in ((1, 2), (1, 4)))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if (model.rank, model.step) == (1, 2) else gradient

    for model_parameter in range(4):  # in the bucket that is complete first, last, and in between
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model = wrap(scaler=scaler, step_in_backward=not outside)
        list(model.module.parameters())[model_parameter].register_hook(spoil)
        for step in range(5):
            if (model.rank, step) == (1, 4):
                model.idle_step()
            else:
                scaler.scale(loss_of(model, model.rank, step)).backward()
            if outside and (model.rank, step) != (1, 4):
                scaler.step(model.optimizer)
                scaler.update()
                model.optimizer.zero_grad()
            assert scaler.get_scale() == (512.0 if step >= 3 else 1024.0)
            assert_rows(model, rows_after(range(step + 1), model.world_size, loss=skipping_loss))


# ------------------------------------------------------------------ different numbers of batches

NUM_BATCHES = (3, 5, 2, 5)


def joined_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Nothing is minimised where a rank had no batch."""
    counted = (*range(NUM_BATCHES[rank]), 5, *range(6, 6 + rank))
    return loss_of(module, rank, step) * (step in counted)


@on_ranks(4)
def test_ranks_that_ended_exchange_until_all_have() -> None:
    for model in in_every_mode(topology="ring"):
        with model.join():
            train(model, range(NUM_BATCHES[model.rank]))
        assert model.step == max(NUM_BATCHES)
        train(model, range(5, 6))
        with model.join():
            train(model, range(6, 6 + model.rank))
        assert model.step == 9
        assert_rows(model, rows_after(range(9), 4, loss=joined_loss, topology="ring"))


@on_ranks(2, anew=True)
def test_exception_inside_join_leaves_it_at_once() -> None:
    model = wrap(topology="ring")
    model.world.timeout = timedelta(seconds=2)  # once both are there
    if model.rank == 1:
        with pytest.raises(ZeroDivisionError), model.join():
            raise ZeroDivisionError
    else:
        with pytest.raises(ExchangeError, match=r"rank 0: waiting in join\(\).*rank 1"), model.join():
            train(model, range(1))


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_one_rank_and_odd_numbers_of_ranks_have_every_feature(world_size: int) -> None:
    for name in ("one_peer_exponential", "complete", "ring", "random_matching"):
        for model in in_every_mode(topology=name):
            with model.join():
                train(model, range(2))
            rows = rows_after(range(2), world_size, topology=name)
            np.testing.assert_allclose(flat(model), rows[model.rank], rtol=0, atol=1e-12)
            distance = np.sqrt(np.square(rows - rows.mean(0)).sum(1).mean())
            assert model.consensus_distance()[0] == pytest.approx(distance, abs=1e-12)
            with model.averaged():
                np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)
            model.idle_step()
            model.global_avg()
            np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)


# ------------------------------------------------------------------ the end


def train_and_fail(model: GossipDataParallel) -> None:
    with model:
        train(model, range(2))
        raise ZeroDivisionError


@on_ranks(2, anew=True)
def test_nothing_of_the_wrapper_is_left_in_the_module_after_its_end() -> None:
    plain = make_module()
    loss_of(plain, 0, 0).backward()
    for mode in small_runs.MODES.values():
        for how in ("close", "exception", "dropped"):
            module = make_module()
            model = wrap(module, **mode)
            if how == "exception":
                with pytest.raises(ZeroDivisionError):
                    train_and_fail(model)
            else:
                train(model, range(2))
            if how == "close":
                model.close()
                with pytest.raises(GossipError, match="has been closed"):
                    model(batch(0, 0))
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
                assert not any(map(torch.equal, module.parameters(), plain.parameters()))
            dist.barrier()
