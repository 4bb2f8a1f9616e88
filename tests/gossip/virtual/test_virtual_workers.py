"""Virtual workers make the steps that plain modules, each with its optimizer, make apart."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from replicas import Awkward
from separate import ADAM, SGD, Separate, assert_same, batch, make_workers, train, train_both, trained_alike
from small_runs import make_module
from torch import nn
from torch.utils.checkpoint import checkpoint

import gossip
from gossip import GossipError, VirtualWorkers

# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 7])
def test_replicas_without_samples_are_mixed_only(num_samples: int) -> None:
    trained_alike(make_module(), 4, topology="ring", inputs=lambda step: batch(num_samples, seed=step))


def test_sum_takes_gradients_as_they_are() -> None:
    trained_alike(make_module(), loss=lambda model, own: model(own).square().sum(), loss_reduction="sum")


def test_the_inputs_gradient_is_that_of_the_loss() -> None:
    inputs, plain = batch(7).requires_grad_(), batch(7).requires_grad_()
    module = make_module()
    make_workers(module, 3)(inputs).square().mean().backward()
    module(plain).square().mean().backward()
    torch.testing.assert_close(inputs.grad, plain.grad)


def gradient_penalty(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return gradient.square().sum(1).mean()


def checkpointed(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    one, other = (checkpoint(model, part.clone().requires_grad_(), use_reentrant=True) for part in (inputs, 2 * inputs))
    return (one * other).mean()


@pytest.mark.parametrize(
    "loss", [gradient_penalty, checkpointed, lambda model, inputs: (model(inputs) * model(inputs + 1)).mean()]
)
def test_a_backward_pass_makes_one_step_whatever_it_goes_through(
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    trained_alike(make_module(), loss=loss)


def test_gradients_of_inputs_alone_make_no_step() -> None:
    workers = make_workers(make_module(), 3)
    with workers.no_sync():
        train(workers, batch(6))
    inputs = batch(6).requires_grad_()
    torch.autograd.grad(workers(inputs).sum(), inputs)
    assert workers.step == 0


def test_no_sync_accumulates() -> None:
    module = make_module()
    workers, separate = make_workers(module, 3), Separate(module, 3)
    for step in range(3):
        with workers.no_sync():
            train(workers, batch(6, seed=step))
            train(workers, batch(2, seed=step + 10))
        separate.backward(batch(6, seed=step))
        separate.backward(batch(2, seed=step + 10))
        assert workers.step == step
        train_both(workers, separate, batch(6, seed=step + 20))
    assert_same(workers, separate)


def test_calls_of_the_optimizer_that_no_backward_pass_precedes_do_nothing_and_are_told_once(
    warnings_told: list[str],
) -> None:
    workers = make_workers(make_module(), 3)
    train(workers, batch(6))
    workers.optimizer.step()
    before = [parameter.detach().clone() for parameter in workers.parameters()]
    for _ in range(2):
        with workers.no_sync():
            train(workers, batch(6))
        workers.optimizer.step()
    assert all(map(torch.equal, workers.parameters(), before))
    (line,) = warnings_told
    assert "step 1: optimizer.step() did nothing: there are gradients" in line
    assert "train in processes, by GossipDataParallel(step_in_backward=False)" in line


def test_idle_step_mixes_and_applies_what_was_accumulated() -> None:
    module = make_module()
    workers, separate = make_workers(module, 3, topology="ring"), Separate(module, 3, topology="ring")
    train_both(workers, separate, batch(6))
    workers.idle_step()
    separate.update(())
    with workers.no_sync():
        train(workers, batch(2))
    workers.idle_step()
    separate.backward(batch(2))
    separate.update((0, 1))
    assert workers.step == 3
    assert_same(workers, separate)


def test_a_backward_pass_that_dies_is_forgotten() -> None:
    module = make_module()
    workers, separate = make_workers(module, 3), Separate(module, 3)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("the user's")

    inputs = batch(6).requires_grad_()
    inputs.register_hook(fail)
    with pytest.raises(KeyError, match="the user's"):
        train(workers, inputs)
    assert workers.step == 0
    for step in range(2):
        train_both(workers, separate, batch(4, seed=step))
    assert workers.step == 2
    assert_same(workers, separate)


# ---------------------------------------------------------------- kinds of parameters


@pytest.mark.parametrize(
    ("optimizer", "bucket_cap_mb", "dtype"),
    covering(itertools.product((SGD, ADAM), (71 / 2**20, 1.0), (torch.float64, torch.float32, torch.bfloat16))),
)
def test_awkward_parameters(optimizer: Any, bucket_cap_mb: float, dtype: torch.dtype) -> None:
    module = Awkward().to(dtype)
    workers = make_workers(module, 3, optimizer, "ring", bucket_cap_mb=bucket_cap_mb)
    separate = Separate(module, 3, optimizer, "ring")
    with torch.no_grad():  # what is frozen or unused is mixed too
        for rank, each in enumerate(separate.modules):
            for name in ("frozen", "unused.weight"):
                dict(workers.named_parameters())[name][rank] += rank
                each.get_parameter(name).add_(rank)
    for step in range(2 if dtype == torch.bfloat16 else 4):
        inputs = 0.3 * batch(7, seed=step).to(dtype)
        train_both(workers, separate, inputs)
    assert_same(workers, separate, atol={torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype])
    replica = workers.replica(1)
    assert isinstance(replica, Awkward)
    assert replica.third.weight is replica.second.weight
    assert replica.filters.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- the optimizer as users see it


def test_a_group_that_is_added_is_trained_from_then_on() -> None:
    def first_layer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in named if each[0].startswith("0.")], lr=0.1)

    module = make_module()
    workers, separate = make_workers(module, 3, first_layer), Separate(module, 3, first_layer)
    for step in range(4):
        if step == 2:
            workers.optimizer.add_param_group({"params": list(workers.module[2].named_parameters()), "lr": 0.5})
            for each, (optimizer,) in zip(separate.modules, separate.optimizers, strict=True):
                optimizer.add_param_group({"params": list(each[2].named_parameters()), "lr": 0.5})
        train_both(workers, separate, batch(6, seed=step))
        assert_same(workers, separate)
    assert workers.optimizer.param_groups[1]["params"][0].shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (lambda module: [("0.weight", module[0].weight)], "already holds it"),
        (lambda _: [("other", nn.Parameter(torch.zeros(2)))], "the module does not have"),
    ],
)
def test_a_group_of_other_parameters_is_refused(added: Callable[[nn.Module], Any], text: str) -> None:
    workers = make_workers(make_module(), 3)
    workers.optimizer.add_param_group({"params": added(workers.module)})
    with pytest.raises(ValueError, match=text):
        train(workers, batch(6))


def test_optimizers_with_a_hook_see_what_was_exchanged() -> None:
    seen: list[tuple[Any, ...]] = []

    class Watching(torch.optim.SGD):
        def pre_average_hook(self, parameters: Any, sent: Any, mixed: Any, round_: Any, round_index: int) -> None:
            assert round_ is workers.topology.round(round_index)
            seen.append((parameters, [each.clone() for each in sent], [each.clone() for each in mixed], round_index))

    def halves(named: list[tuple[str, nn.Parameter]]) -> tuple[torch.optim.Optimizer, ...]:
        return Watching(named[:1], lr=0.1), torch.optim.SGD(named[1:], lr=0.1)

    workers = make_workers(make_module(), 3, halves, "ring", bucket_cap_mb=1e-6)
    matrix = torch.from_numpy(workers.topology.round(0).matrix())
    train(workers, batch(6))
    before = next(workers.parameters()).detach().clone()
    train(workers, batch(6, seed=1))
    (((parameter,), (sent,), (mixed,), round_index),) = seen
    assert parameter is next(workers.parameters())
    assert round_index == 0
    assert torch.equal(sent, before)
    torch.testing.assert_close(mixed, torch.tensordot(matrix, before, 1))
    with pytest.raises(ValueError, match=r"choco.* cannot serve Watching"):
        make_workers(make_module(), 3, functools.partial(Watching, lr=0.1), "ring", compression="choco")


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"dim": None}, TypeError, "dim must be an integer of at least 0, got None"),
        ({"loss_reduction": "none"}, ValueError, 'loss_reduction must be "mean" or "sum", got \'none\''),
        ({"devices": "cpu"}, ValueError, "devices must be a sequence of at least one device.*got 'cpu'"),
        ({"devices": ["cpu"] * 5}, ValueError, "devices names 5 devices for 4 replicas; give at most one per replica"),
        ({"devices": ["gpu"]}, ValueError, r'devices must name devices of torch, such as "cpu".*got \[.gpu.\]'),
        ({"module": lambda: 3}, TypeError, "module must be a torch.nn.Module or a function that makes one, got int"),
        ({"module": nn.ReLU()}, ValueError, "module ReLU has no parameters"),
        ({"module": nn.LazyLinear(3)}, ValueError, "is lazy; run one forward"),
        ({"module": nn.Embedding(3, 2, sparse=True)}, ValueError, "sparse=True.*build it with sparse=False"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    chosen = {"module": make_module(), "world_size": 4, "optimizer": SGD, "devices": ["cpu"]} | arguments
    with pytest.raises(error, match=text):
        VirtualWorkers(**chosen)


# ---------------------------------------------------------------------- their mean, and each replica by itself


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


def test_inside_averaged_nothing_is_trained_or_saved(tmp_path: Path) -> None:
    workers = make_workers(make_module(), 3)
    loss = workers(batch(6)).square().mean()
    with workers.averaged():
        for refused in (loss.backward, workers.idle_step):
            with pytest.raises(GossipError, match=r"inside averaged\(\)"):
                refused()
        with pytest.raises(GossipError, match=r"step 0: nothing can be saved or loaded inside averaged\(\)"):
            gossip.save(workers, tmp_path)
        workers.module(batch(6)).sum().backward()
    assert workers.step == 0
    train(workers, batch(6))
    assert workers.step == 1


def test_global_avg_makes_replicas_equal_and_drops_what_is_in_flight() -> None:
    module = make_module()
    workers, separate = make_workers(module, 3, topology="ring"), Separate(module, 3, topology="ring")
    train_both(workers, separate, batch(6))
    workers.global_avg()
    assert workers.consensus_distance() == (0.0, 0.0)
    for own in zip(*(each.parameters() for each in separate.modules), strict=True):
        mean = torch.stack([each.detach() for each in own]).mean(0)
        for each in own:
            each.data.copy_(mean)
    assert_same(workers, separate)
    for one, other in zip(workers.module.parameters(), workers.replica(2).parameters(), strict=True):
        assert torch.equal(one, other)
    train_both(workers, separate, batch(6, seed=1))  # replicas are equal: mixing them changes nothing
    assert_same(workers, separate)
    assert workers.step == 2
