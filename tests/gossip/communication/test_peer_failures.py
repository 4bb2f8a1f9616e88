"""Failures seen in other trainers of this kind, each as a test that fails if ours had it: wrong or lost values.

Those that crash, hang or outlive their model are in ``test_peer_crashes.py``.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from ranks import run_ranks
from replicas import gathered
from repository import REPOSITORY
from small_runs import (
    LR,
    assert_rows,
    batch,
    finish,
    flat,
    in_every_mode,
    loss_of,
    make_module,
    rows_after,
    train,
    wrap,
)
from torch import nn

from gossip import GossipDataParallel

HELD_ELSEWHERE = {
    "groups are inverted: biases and norms decay instead of weights":
        "test_optimizers.py::test_weight_decay_spares_biases_and_norms_if_the_groups_say_so",
    "of two forwards that one loss uses, only one is trained":
        "test_engine.py::test_two_forwards_before_one_backward_are_one_step",
    "an evaluation without gradients counts as a step":
        "test_engine.py::test_evaluation_and_forwards_without_backward_are_no_steps",
    "a network whose output feeds another one before any backward is not trained":
        "test_accumulation.py::test_two_networks_with_two_losses",
    "accumulated gradients differ from one large batch's":
        "test_accumulation.py::test_accumulation_equals_one_large_batch",
    "the first mix uses another round's weights":
        "test_oracle.py::test_processes_equal_dense_recursion",
    "rounds 0 and 2 are skipped, or a hook advances the topology once per call":
        "test_wrapper.py::test_rounds_count_from_0_without_a_skip_in_every_bucket",
    "the hook for communicated data is told the wrong round":
        "test_optimizers.py::test_pre_average_hook_sees_every_exchange_with_its_own_round",
    "a global average is thrown away by what was in flight":
        "test_averaging.py::test_global_avg_makes_all_ranks_equal_and_drops_what_was_in_flight",
    "buffers are not put back after the average":
        "test_averaging.py::test_averaged_restores_everything_and_training_goes_on_bit_for_bit",
    "values loaded between steps are overwritten at the next mix":
        "test_edits_and_copies.py::test_every_way_to_write_values_survives",
    "one dtype's gradients and values are cast to another's":
        "test_layouts.py::test_every_layout_trains_as_in_plain_torch",
    "bfloat16 buffers are not averaged":
        "test_buffers.py::test_buffers_stay_local_until_the_average",
    "bfloat16 buffers are not mixed":
        "test_buffers.py::test_buffers_are_mixed_in_every_step_if_so_wished",
    "buffers and frozen parameters differ at the start":
        "test_wrapper.py::test_construction_copies_rank_0_parameters_and_buffers",
    "integer, boolean and 8-bit buffers differ at the start":
        "test_engine.py::test_buffers_of_every_dtype_come_from_rank_0",
    "frozen parameters, or those unfrozen later, are never mixed":
        "test_accumulation.py::test_every_parameter_is_mixed_whatever_is_frozen",
    "gradients of parts used in the first micro-batch only leak into the next step":
        "test_accumulation.py::test_gradients_from_no_sync_alone_are_applied_and_nothing_leaks",
    "what is clipped depends on the number of buckets":
        "test_clipping_and_scaling.py::test_global_clipping_is_torch_s_own",
    "loss scales drift apart, and the peers of a rank that skips wait forever":
        "test_clipping_and_scaling.py::test_overflow_on_one_rank_keeps_scales_equal_and_nobody_waiting",
    "a gradient that is not a number leaves its rank":
        "test_clipping_and_scaling.py::test_gradient_that_is_not_finite_stays_on_its_rank",
    "a parameter that is not a number spreads to all ranks unnoticed":
        "test_clipping_and_scaling.py::test_message_that_is_not_finite_is_refused_by_its_peers",
    "a world of one crashes":
        "test_wrapper.py::test_world_of_one_trains_as_plain_torch",
    "odd sizes crash":
        "test_modes.py::test_every_algorithm_in_every_mode_equals_its_recursion",
    "frozen batch norm in a model that trains crashes":
        "test_accumulation.py::test_frozen_batch_norm_and_checkpointing_train",
    "a gradient that comes after its bucket's update corrupts it":
        "test_wrapper.py::test_second_gradient_for_an_updated_bucket_is_refused",
    "parameters that differ in shape, dtype or order abort the process":
        "test_manifest.py::test_manifest_difference_is_named_on_every_rank",
    "uneven numbers of batches cannot be trained":
        "test_join.py::test_ranks_that_ended_exchange_until_all_have",
    "uneven numbers of batches hang, and nobody says who is missing":
        "test_join.py::test_without_join_the_time_out_names_who_is_missing",
    "parameters that are not contiguous crash, or are not mixed":
        "test_layouts.py::test_every_layout_is_mixed",
    "a deep copy crashes, or communicates":
        "test_edits_and_copies.py::test_copies_are_detached_and_the_model_trains_on",
    "torch.compile of the wrapper crashes":
        "test_edits_and_copies.py::test_compiled_model_trains_as_the_eager_one",
    "a run cannot be resumed, or every rank gets rank 0's tensors":
        "test_checkpoints.py::test_resumed_run_is_the_uninterrupted_one_bit_for_bit",
    "two optimizers come back mixed up":
        "test_checkpoint_resize.py::test_two_optimizers_come_back_each_to_its_own",
    "an optimizer stepped by bucket is another one than it was":
        "test_bucket_optimizer.py::test_buckets_step_as_the_whole_does",
}  # fmt: skip
"""What goes wrong elsewhere -> the test that would fail if it did here."""


@pytest.mark.parametrize("failure", HELD_ELSEWHERE)
def test_every_failure_that_is_held_elsewhere_has_its_test(failure: str) -> None:
    """A test that was renamed, moved, removed or switched off no longer holds anything."""
    file, name = HELD_ELSEWHERE[failure].split("::")
    (path,) = (REPOSITORY / "tests").rglob(file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    assert len(found) == 1, f"{file} has no {name}"
    marks = {ast.unparse(each).partition("(")[0] for each in found[0].decorator_list}
    assert not marks & {"pytest.mark.skip", "pytest.mark.xfail"}


# ------------------------------------------------------------------ nothing is trained


def forward_twice_first() -> None:
    for model in in_every_mode():
        for _ in range(2):
            model(batch(model.rank, 7)).sum()
        train(model, range(3))
        assert model.step == 3
        assert_rows(model, rows_after(range(3), model.world_size))


def test_two_forwards_before_the_first_backward() -> None:
    """After two forwards before the first backward nothing is ever trained, without an error."""
    run_ranks(forward_twice_first, world_size=3)


def forward_without_gradients_first() -> None:
    for guard in (torch.no_grad, torch.inference_mode):
        for model in in_every_mode():
            assert model.training
            with guard():
                model(batch(model.rank, 7))
            train(model, range(3))
            assert model.step == 3
            assert_rows(model, rows_after(range(3), model.world_size))


def test_forward_without_gradients_in_train_mode_first() -> None:
    """After a no_grad or inference_mode forward in train mode nothing is ever trained, without an error."""
    run_ranks(forward_without_gradients_first, world_size=2)


def zero_grad_first() -> None:
    for model in in_every_mode():
        for step in range(3):
            for zeroed in (model, model.module, model.optimizer):
                zeroed.zero_grad()
            loss = loss_of(model, model.rank, step)
            model.zero_grad()
            loss.backward()
            model.optimizer.step()
            assert_rows(model, rows_after(range(step + 1), model.world_size))


def test_zero_grad_before_forward_and_before_backward_loses_no_update() -> None:
    """zero_grad() before the forward loses the first update."""
    run_ranks(zero_grad_first, world_size=2)


def accumulate_as_documented() -> None:
    num_backwards = 3

    def micro_loss(module: nn.Module, rank: int, step: int, micro: int) -> torch.Tensor:
        return loss_of(module, rank, num_backwards * step + micro) / num_backwards

    def whole_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return torch.stack([micro_loss(module, rank, step, micro) for micro in range(num_backwards)]).sum()

    for model in in_every_mode():
        for step in range(3):
            model.optimizer.zero_grad()
            with model.no_sync():
                for micro in range(num_backwards - 1):
                    micro_loss(model, model.rank, step, micro).backward()
            micro_loss(model, model.rank, step, num_backwards - 1).backward()
            model.optimizer.step()
            assert model.step == step + 1
            assert_rows(model, rows_after(range(step + 1), model.world_size, loss=whole_loss))


def test_documented_accumulation_loop_updates_and_mixes() -> None:
    """The documented accumulation loop never updates."""
    run_ranks(accumulate_as_documented, world_size=3)


# ------------------------------------------------------------------ averages and edits between steps


def average_at_every_place() -> None:
    for early in range(3):  # before the first forward, before the second, before the third
        for model in in_every_mode():
            train(model, range(early))
            rows = rows_after(range(early), model.world_size)
            for _ in range(2):
                model.global_avg()
                np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)
            assert model.step == early
            train(model, range(early, early + 3))
            later = range(early, early + 3)
            assert_rows(model, rows_after(later, model.world_size, start=rows.mean(0)))


def test_global_average_before_any_forward_and_twice_in_a_row_is_trained_on() -> None:
    """global_avg crashes before the second forward; training after it goes on from the values before it."""
    run_ranks(average_at_every_place, world_size=4)


def look_twice_in_a_row() -> None:
    def make() -> nn.Module:
        return nn.Sequential(make_module()[0], nn.BatchNorm1d(4).double(), nn.Linear(4, 2).double())

    for model in in_every_mode(make):
        for step in range(3):
            train(model, range(step, step + 1))
            before = copy.deepcopy(model.state_dict())
            rows = {name: gathered(value) for name, value in before.items()}
            for _ in range(2):
                with model.averaged():
                    for name, value in model.state_dict().items():
                        wanted = rows[name].mean(0) if value.is_floating_point() else rows[name][0]
                        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
                for name, value in model.state_dict().items():
                    assert torch.equal(value, before[name]), name
            assert not torch.equal(rows["1.running_mean"][0], rows["1.running_mean"][1])


def test_looking_at_the_average_twice_in_a_row_puts_all_back() -> None:
    """A global average twice in a row breaks the revert; buffers are not reverted."""
    run_ranks(look_twice_in_a_row, world_size=2)


def edited(rank: int, step: int, x: np.ndarray) -> np.ndarray:
    """Clamped before steps 1 to 3, loaded from elsewhere before step 4."""
    return np.full_like(x, 0.1 * (rank + 1)) if step == 4 else x.clip(-0.2, 0.2) if step else x


def edit_between_steps() -> None:
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


def test_clamping_and_loading_between_steps_are_mixed_in_not_overwritten() -> None:
    """What load_state_dict and clamping wrote between steps is overwritten at the next mix."""
    run_ranks(edit_between_steps, world_size=3)


def swap_between_steps() -> None:
    for model in in_every_mode():
        for step in range(4):
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict({name: 0.5 * value for name, value in kept.items()})
            with torch.no_grad():
                halved = model(batch(model.rank, 9))
            model.load_state_dict(kept)
            assert not torch.equal(halved, model.module(batch(model.rank, 9)))
            train(model, range(step, step + 1))
        assert_rows(model, rows_after(range(4), model.world_size))


def test_values_swapped_in_for_an_evaluation_and_out_again_leave_no_trace() -> None:
    """What an EMA swap put back is overwritten at the next mix, or what it put in is mixed."""
    run_ranks(swap_between_steps, world_size=2)


def mix_three_dtypes() -> None:
    values = {
        "narrow": (torch.float32, 1.0),
        "wide": (torch.float64, 1e-13),  # lost in float32
        "low": (torch.bfloat16, 2**-6),
    }
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(3, dtype=dtype)) for name, (dtype, _) in values.items()})
    model = GossipDataParallel(module, None, "complete")

    def spread() -> None:
        with torch.no_grad():
            for name, (_, unit) in values.items():
                module[name].fill_(1 + unit * model.rank)

    def assert_means() -> None:
        for name, (dtype, unit) in values.items():
            assert module[name].dtype == dtype
            assert module[name].tolist() == pytest.approx([1 + unit / 2] * 3, rel=0, abs=1e-15), name

    spread()
    for _ in range(2):
        model.idle_step()
    assert_means()
    spread()
    model.global_avg()
    assert_means()
    model.close()


def test_every_dtype_is_mixed_and_averaged_in_its_own_precision() -> None:
    """Parameters of mixed dtypes are cast to the first one's."""
    run_ranks(mix_three_dtypes, world_size=2)


def average_without_gradients() -> None:
    for model in in_every_mode(topology="complete"):
        train(model, range(2))
        model.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        rows = gathered(torch.from_numpy(flat(model))).numpy()
        assert np.ptp(rows, axis=0).min() > 0  # every single value differs
        with model.averaged():
            np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)
        for _ in range(2):
            model.idle_step()  # the first sends, the second mixes
        np.testing.assert_allclose(flat(model), rows.mean(0), rtol=0, atol=1e-12)


def test_parameters_without_gradients_are_mixed_and_averaged() -> None:
    """An averager that selects parameters by their gradients silently does nothing after a step in backward."""
    run_ranks(average_without_gradients, world_size=2)


# ------------------------------------------------------------------ parts that are not always used


class Branches(nn.Module):
    """Four layers; the caller says which ones run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)).double()

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        for part in chosen:
            x = torch.tanh(self.parts[part](x))
        return x


def late_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Part 1 is used from step 1 on, part 2 from step 2 on by rank 0 only, part 3 never."""
    chosen = (0, 1, 2) if step >= 2 and rank == 0 else (0, 1) if step else (0,)
    return module(batch(rank, step), chosen).square().mean()


def dynamic_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Another order in every step, other parts on every rank, and a part that is used twice."""
    chosen = ((0, 1, 2), (2, 1, 0), (rank, 3), (1, 1), (3, 2, rank))[step]
    return module(batch(rank, step), chosen).square().mean()


def train_branches() -> None:
    for loss in (late_loss, dynamic_loss):
        for model in in_every_mode(Branches):
            for step in range(5):
                train(model, range(step, step + 1), loss)
                assert all(parameter.grad is None for parameter in model.parameters()), "a gradient is left over"
                rows = rows_after(range(step + 1), model.world_size, make=Branches, loss=loss)
                assert_rows(model, rows)


def test_parts_unused_at_first_or_used_in_another_order_are_trained_and_mixed() -> None:
    """Parameters unused in the first iteration never train nor average; a dynamic graph leaks gradients."""
    run_ranks(train_branches, world_size=3)


# ------------------------------------------------------------------ optimizers and scalers


class OwnAdam(torch.optim.Adam):
    """A user's own."""


class OwnAdamW(torch.optim.AdamW):
    """A user's own."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnAdam, torch.optim.AdamW, OwnAdamW])
def test_weight_decay_is_the_optimizers_own_whatever_it_descends_from(kind: type[torch.optim.Optimizer]) -> None:
    """Dispatch by isinstance takes AdamW for Adam, its base class, and couples the decay to the gradient."""
    decoupled = issubclass(kind, torch.optim.AdamW)
    for model in in_every_mode(optimizer=functools.partial(kind, lr=LR, weight_decay=0.5)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        (model(batch(0, 0)) * 0).sum().backward()  # gradients of zero: only the decay acts
        finish(model)
        for actual, value in zip(model.parameters(), before, strict=True):
            # Adam divides by the size of its gradient, which is the decay alone.
            wanted = value * (1 - LR * 0.5) if decoupled else value - LR * value.sign()
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6)


def overflow_in_one_bucket(outside: bool) -> None:
    def skipping_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(module, rank, step) * ((rank, step) != (1, 2))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if (model.rank, model.step) == (1, 2) else gradient

    for model_parameter in range(4):  # in the bucket that is complete first, last, and in between
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model = wrap(scaler=scaler, step_in_backward=not outside)
        list(model.module.parameters())[model_parameter].register_hook(spoil)
        for step in range(5):
            scaler.scale(loss_of(model, model.rank, step)).backward()
            if outside:
                scaler.step(model.optimizer)
                scaler.update()
                model.optimizer.zero_grad()
            assert scaler.get_scale() == (512.0 if step >= 3 else 1024.0)
            assert_rows(model, rows_after(range(step + 1), model.world_size, loss=skipping_loss))
        model.close()


@pytest.mark.parametrize("outside", [False, True])
def test_overflow_in_any_one_bucket_skips_the_update_of_all(outside: bool) -> None:
    """An overflow skips the bucket in which it was found and updates the others."""
    run_ranks(overflow_in_one_bucket, outside, world_size=2)
