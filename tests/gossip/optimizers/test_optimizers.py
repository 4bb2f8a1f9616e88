"""The optimizers that people bring: several, third-party ones, with closures, hooks and schedulers."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from ranks import run_ranks
from small_runs import MODES, TINY_BUCKETS, assert_same
from torch import nn
from torch.optim import lr_scheduler

from gossip import GossipDataParallel, GossipError, UsesExchange
from topologies import Round, build

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def optimizers_of(model: GossipDataParallel) -> tuple[torch.optim.Optimizer, ...]:
    return model.optimizer if isinstance(model.optimizer, tuple) else (model.optimizer,)


def step_all(model: GossipDataParallel) -> None:
    if not model._arguments.step_in_backward:
        for optimizer in optimizers_of(model):
            optimizer.step()
        for optimizer in optimizers_of(model):
            optimizer.zero_grad()


def trained_as_plain(
    make: Callable[[nn.Module], tuple[torch.optim.Optimizer, ...]],
    mode: str,
    make_scheduler: Callable[[torch.optim.Optimizer], object] | None = None,
    num_steps: int = 4,
    *metrics: float,
) -> GossipDataParallel:
    """A model whose training, without a warning, was that of the bare module with these optimizers, bit for bit."""
    plain, module = make_module(), make_module()
    optimizers = make(plain)
    model = GossipDataParallel(module, make(module), bucket_cap_mb=TINY_BUCKETS, **MODES[mode])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in", UserWarning)  # SequentialLR calls it itself
        all_optimizers = (*optimizers_of(model), *optimizers) if make_scheduler is not None else ()
        schedulers = [make_scheduler(each) for each in all_optimizers]
        for step in range(num_steps):
            plain(batch(step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            step_all(model)
            for scheduler in schedulers:
                scheduler.step(*metrics)
    assert model.step == num_steps
    assert_same(model, plain)
    return model


def muon_and_adamw(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("mode", MODES)
def test_muon_on_matrices_beside_adamw_on_the_rest(mode: str) -> None:
    trained_as_plain(muon_and_adamw, mode, lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9))


def test_optimizers_that_share_a_parameter_are_refused_by_name() -> None:
    module = make_module()
    with pytest.raises(ValueError, match=r"parameter '3\.weight' is held by two optimizers"):
        GossipDataParallel(module, (SGD(module.parameters()), SGD([module[3].weight])))


def test_one_of_two_optimizers_stepped_twice_is_refused() -> None:
    module = make_module()
    model = GossipDataParallel(
        module, (SGD(module[0].parameters()), SGD(module[3].parameters())), step_in_backward=False
    )
    model(batch(0)).sum().backward()
    model.optimizer[0].step()
    assert model.step == 0
    with pytest.raises(GossipError, match=r"SGD\.step\(\) was called twice, but not every optimizer once"):
        model.optimizer[0].step()


def test_closure_optimizer_is_refused_inside_backward() -> None:
    module = make_module()
    with pytest.raises(ValueError, match=r"LBFGS evaluates a closure several times per step.*step_in_backward=False"):
        GossipDataParallel(module, torch.optim.LBFGS(module.parameters()), clip_grad_norm=1.0)


@pytest.mark.parametrize("mode", MODES)
def test_step_hooks_fire_once_per_step(mode: str) -> None:
    model = GossipDataParallel(make_module(), SGD, bucket_cap_mb=TINY_BUCKETS, **MODES[mode])
    calls: list[str] = []
    model.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    if mode == "in backward":
        with pytest.raises(ValueError, match=r"register_step_pre_hook cannot work here.*step_in_backward=False"):
            model.optimizer.register_step_pre_hook(lambda *_: None)
    else:
        seen = lambda optimizer, *_: calls.append(  # noqa: E731
            "pre" if all(p.grad is not None for p in optimizer.param_groups[0]["params"]) else "pre without gradients"
        )
        model.optimizer.register_step_pre_hook(seen)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        step_all(model)
        if model._arguments.step_in_backward:
            model.optimizer.step()  # what a loop may still do
    assert calls == (["post"] if mode == "in backward" else ["pre", "post"]) * 3


def test_optimizer_with_pre_hooks_is_refused_where_they_would_see_nothing() -> None:
    module = make_module()
    optimizer = SGD(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="SGD has step pre-hooks"):
        GossipDataParallel(module, optimizer)
    assert GossipDataParallel(module, optimizer, step_in_backward=False).step == 0


def test_step_outside_backward_needs_an_optimizer() -> None:
    with pytest.raises(ValueError, match="step_in_backward=False needs an optimizer"):
        GossipDataParallel(make_module(), None, step_in_backward=False)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),  # and the momentum
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize(("name", "mode"), list(zip(SCHEDULERS, itertools.cycle(MODES), strict=False)))
def test_every_kind_of_scheduler_works_as_ever(name: str, mode: str) -> None:
    metrics = (1.0,) if name == "ReduceLROnPlateau" else ()
    trained_as_plain(lambda module: (SGD(module.parameters()),), mode, SCHEDULERS[name], 5, *metrics)


@pytest.mark.parametrize("mode", MODES)
def test_state_dict_goes_to_the_bare_optimizer_and_back(mode: str) -> None:
    factory = functools.partial(torch.optim.AdamW, lr=0.01)
    module = make_module()
    model = GossipDataParallel(module, factory, bucket_cap_mb=TINY_BUCKETS, **MODES[mode])
    plain = make_module()
    optimizer = factory(list(plain.named_parameters()))

    def train(each: nn.Module, steps: range) -> None:
        for step in steps:
            each(batch(step)).square().mean().backward()
            if each is plain:
                optimizer.step()
                optimizer.zero_grad()
            else:
                step_all(each)

    train(model, range(2))
    plain.load_state_dict(model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))
    train(plain, range(2, 4))
    model.load_state_dict(plain.state_dict())
    model.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, range(4, 6))
    train(plain, range(4, 6))
    assert_same(model, plain)


class Watching(torch.optim.SGD):
    """Notes what it is shown of every exchange."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.seen: list[tuple[int, Round, list[torch.Tensor], list[torch.Tensor]]] = []

    def pre_average_hook(
        self,
        parameters: Sequence[nn.Parameter],
        sent: Sequence[torch.Tensor],
        mixed: Sequence[torch.Tensor],
        round_: Round,
        round_index: int,
    ) -> None:
        assert [p.shape for p in parameters] == [s.shape for s in sent] == [m.shape for m in mixed]
        self.seen.append((round_index, round_, [s.clone() for s in sent], [m.clone() for m in mixed]))


def watch(algorithm: str) -> list[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    module = make_module()
    optimizer = Watching(module.parameters(), lr=0.1)
    assert isinstance(optimizer, UsesExchange)
    topology = build("one_peer_exponential", 4)
    model = GossipDataParallel(module, optimizer, topology, algorithm=algorithm)
    for step in range(4):
        model(batch(10 * model.rank + step)).square().mean().backward()
    assert all(round_ == topology.round(index) for index, round_, _, _ in optimizer.seen)
    model.close()
    return [(index, sent, mixed) for index, _, sent, mixed in optimizer.seen]


@pytest.mark.parametrize("algorithm", ["adapt_while_communicating", "adapt_then_combine"])
def test_pre_average_hook_sees_every_exchange_with_its_own_round(algorithm: str) -> None:
    seen = run_ranks(watch, algorithm, world_size=4)
    topology = build("one_peer_exponential", 4)
    num_rounds = 4 if algorithm == "adapt_then_combine" else 3  # the last one is combined by close(), or dropped
    for mine in seen:
        assert [index for index, _, _ in mine] == list(range(num_rounds))
    for place in range(num_rounds):
        matrix = torch.from_numpy(topology.round(place).matrix()).float()
        for tensor in range(len(seen[0][place][1])):
            sent = torch.stack([mine[place][1][tensor] for mine in seen])
            mixed = torch.stack([mine[place][2][tensor] for mine in seen])
            torch.testing.assert_close(mixed, torch.einsum("ij,j...->i...", matrix, sent))


@pytest.mark.parametrize("compression", ["choco", "powergossip"])
def test_pre_average_hook_is_refused_where_messages_are_changes(compression: str) -> None:
    text = r"cannot serve Watching.*pre_average_hook.*choose none, bf16, fp16, int8 or int4"
    with pytest.raises(ValueError, match=text):
        GossipDataParallel(make_module(), functools.partial(Watching, lr=0.1), "ring", compression=compression)
