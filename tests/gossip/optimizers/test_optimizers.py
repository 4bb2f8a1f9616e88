"""The optimizers that people bring: stepped bucket by bucket as at once, several, third-party ones, with hooks."""

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from ranks import run_ranks
from replicas import SGD, assert_equal_states
from small_runs import MODES, TINY_BUCKETS, assert_same, finish, loss_of, make_module, optimizers_of
from torch import nn
from torch.optim import lr_scheduler

from gossip import GossipDataParallel, GossipError, MuonAdamW, UsesExchange
from topologies import Round, build


def muon_and_adamw(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim != 2]
    return torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, 0.01, (0.9, 0.95), weight_decay=0.1)


@pytest.mark.parametrize("as_one", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_muon_on_matrices_beside_adamw_on_the_rest(mode: str, as_one: bool) -> None:
    """With schedulers, of which some are older than the model, as the bare module is trained, bit for bit."""
    plain, module = make_module(), make_module()
    optimizers = muon_and_adamw(plain)
    own = () if as_one else muon_and_adamw(module)
    schedulers = [lr_scheduler.ExponentialLR(each, 0.9) for each in (*optimizers, *own)]
    made = own or functools.partial(MuonAdamW, lr=0.05, adamw_lr=0.01)
    model = GossipDataParallel(module, made, bucket_cap_mb=TINY_BUCKETS, **MODES[mode])
    schedulers += [lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers_of(model) if as_one]
    for step in range(4):
        loss_of(plain, 0, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        finish(model)
        for scheduler in schedulers:
            scheduler.step()
    assert model.step == 4
    assert_same(model, plain)


def test_optimizers_that_share_a_parameter_are_refused_by_name() -> None:
    module = make_module()
    with pytest.raises(ValueError, match=r"parameter '2\.weight' is held by two optimizers"):
        GossipDataParallel(module, (SGD(module.parameters()), SGD([module[2].weight])))


def test_one_of_two_optimizers_stepped_twice_is_refused() -> None:
    module = make_module()
    model = GossipDataParallel(
        module, (SGD(module[0].parameters()), SGD(module[2].parameters())), step_in_backward=False
    )
    loss_of(model, 0, 0).backward()
    model.optimizer[0].step()
    assert model.step == 0
    with pytest.raises(GossipError, match=r"SGD\.step\(\) was called twice, but not every optimizer once"):
        model.optimizer[0].step()


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
        loss_of(model, 0, step).backward()
        finish(model)
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
        loss_of(model, model.rank, step).backward()
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
        matrix = torch.from_numpy(topology.round(place).matrix())
        for tensor in range(len(seen[0][place][1])):
            sent = torch.stack([mine[place][1][tensor] for mine in seen])
            mixed = torch.stack([mine[place][2][tensor] for mine in seen])
            torch.testing.assert_close(mixed, torch.einsum("ij,j...->i...", matrix, sent))


@pytest.mark.parametrize("compression", ["choco", "powergossip"])
def test_pre_average_hook_is_refused_where_messages_are_changes(compression: str) -> None:
    text = r"cannot serve Watching.*pre_average_hook.*choose none, bf16, fp16, int8 or int4"
    with pytest.raises(ValueError, match=text):
        GossipDataParallel(make_module(), functools.partial(Watching, lr=0.1), "ring", compression=compression)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad fused": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


def split_groups(named: list[tuple[str, nn.Parameter]], factory: Callable[..., torch.optim.Optimizer]) -> object:
    """Biases with a rate of their own."""
    return factory(
        [
            {"params": [p for name, p in named if name.endswith("weight")]},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.003},
        ]
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buckets_step_as_the_whole_does(name: str) -> None:
    plain = make_module()
    optimizer = split_groups(list(plain.named_parameters()), OPTIMIZERS[name])
    model = GossipDataParallel(
        make_module(), functools.partial(split_groups, factory=OPTIMIZERS[name]), bucket_cap_mb=TINY_BUCKETS
    )
    for step in range(6):
        for group in (*optimizer.param_groups, *model.optimizer.param_groups):
            group["lr"] *= 0.9  # what schedulers do
        loss_of(plain, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
    assert_equal_states(model.state_dict(), plain.state_dict())
    assert_equal_states(model.optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_group_added_after_wrapping_is_trained_from_then_on() -> None:
    module, plain = make_module(), make_module()
    model = GossipDataParallel(module, torch.optim.SGD(module[2].parameters(), lr=0.1), bucket_cap_mb=TINY_BUCKETS)
    optimizer = torch.optim.SGD(plain[2].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            model.optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
            optimizer.add_param_group({"params": plain[0].parameters(), "lr": 0.01})
        loss_of(model, 0, step).backward()
        loss_of(plain, 0, step).backward()
        optimizer.step()
        plain.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
    assert_equal_states(module.state_dict(), plain.state_dict())
