"""What people who come from plain loops do: it works, or is refused with the reason, but never silently trains less."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from ranks import on_ranks
from replicas import SGD, TINY_BUCKETS
from small_runs import batch, make_module
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossip import GossipDataParallel, GossipError
from topologies import build

# ------------------------------------------------------------------ construction


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"topology": 3}, TypeError, "topology must be a name or a topologies.Topology, got int"),
        ({"topology": build("ring", 4)}, ValueError, "is for 4 ranks, but there are 1"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be a positive number of MiB, got 0"),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm must be a positive norm, got nan"),
        ({"clip_grad_norm": True}, TypeError, "clip_grad_norm must be a norm, got True"),
        ({"clip": "all"}, ValueError, """clip must be "global" or "bucket", got 'all'"""),
        ({"clip_grad_norm": 1.0, "step_in_backward": False}, ValueError, r"call model\.clip_grad_norm_"),
        ({"buffers": "mean"}, ValueError, """buffers must be "local" or "average", got 'mean'"""),
        ({"optimizer": 3}, TypeError, "several in a tuple, or a factory"),
        ({"step_in_backward": False}, ValueError, "step_in_backward=False needs an optimizer"),
        ({"record": "folder"}, ValueError, 'record=folder is for on_peer_loss="continue"'),
        (
            {"device_ids": [0], "static_graph": True},
            TypeError,
            r"^device_ids is not needed: the .*; leave it out; static_graph is not needed: .*; leave it out$",
        ),
        ({"topolgy": "ring"}, TypeError, "^there is no topolgy; did you mean topology[?]$"),
        ({"lr": 0.1}, TypeError, "^lr is the optimizer's; pass optimizer="),
        ({"xyz": 0}, TypeError, "^there is no xyz; there are: module, optimizer, topology, algorithm"),
        ({"optimizer": torch.optim.LBFGS, "clip_grad_norm": 1.0}, ValueError, r"LBFGS .*step_in_backward=F"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, ValueError, "that the module does not have"),
    ],
)
def test_construction_refuses_arguments_with_the_reason(kwargs: dict, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        GossipDataParallel(nn.Linear(2, 2), **{"optimizer": None} | kwargs)


def test_construction_without_process_group_refuses_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"init_process_group first, or start the function with gossip\.launch"):
        GossipDataParallel(nn.Linear(2, 2), None)


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("arguments", [{}, {"step_in_backward": False}])
def test_optimizer_that_the_model_does_not_know_is_refused_at_its_step(arguments: dict) -> None:
    """The loop of DistributedDataParallel, taken over as it is."""
    module = make_module()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with GossipDataParallel(module, SGD, **arguments) as model:
        foreign = SGD(module[2].parameters())
        model(batch(0, 0)).sum().backward()
        with pytest.raises(GossipError, match=r"SGD\.step\(\): parameter '2\.weight' belongs to a GossipDataParallel"):
            foreign.step()
        other.step()
        model.optimizer.step()
    foreign.step()
    with pytest.raises(TypeError, match="optimizer"):
        GossipDataParallel(module)


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self) -> None:
        self.base.step()


def test_optimizer_with_another_inside_is_refused_by_bucket_and_works_outside() -> None:
    def factory(named: list) -> Lookahead:
        return Lookahead(torch.optim.SGD([parameter for _, parameter in named], lr=0.1))

    with pytest.raises(ValueError, match="Lookahead keeps parameters or another optimizer in its attribute 'base'"):
        GossipDataParallel(make_module(), factory)
    model, plain = GossipDataParallel(make_module(), factory, step_in_backward=False), make_module()
    for module in (model, plain):
        module(batch(0, 0)).square().mean().backward()
    model.optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_group_that_changes_place_keeps_its_own_constants() -> None:
    module, plain = make_module(), make_module()
    models = []
    for each in (module, plain):
        groups = [{"params": [each[0].weight], "lr": 0.1}, {"params": [each[2].weight], "lr": 0.001}]
        models.append(torch.optim.SGD(groups))
    model = GossipDataParallel(module, models[0], bucket_cap_mb=TINY_BUCKETS)
    for step in range(2):
        for each, optimizer in zip((model, plain), models, strict=True):
            each(batch(0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups.reverse()
    plain.zero_grad()
    assert torch.equal(module[0].weight, plain[0].weight)
    assert torch.equal(module[2].weight, plain[2].weight)


# ------------------------------------------------------------------ modules


def test_functional_call_leaves_the_models_own_values_alone() -> None:
    model = GossipDataParallel(make_module(), SGD)
    before = copy.deepcopy(model.state_dict())
    others = {f"module.{name}": nn.Parameter(torch.full_like(value, 0.5)) for name, value in before.items()}
    torch.func.functional_call(model, others, (batch(0, 0),)).sum().backward()
    assert all(other.grad is not None for other in others.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.step == 0
    model(batch(0, 0)).sum().backward()
    assert model.step == 1


class Accumulating(nn.Module):
    """Puts another tensor into its buffer in each forward pass, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return self.layer(x - self.mean)


def test_buffers_replaced_inside_averaged_are_put_back() -> None:
    model = GossipDataParallel(Accumulating().double(), SGD)
    model(batch(0, 0)).sum().backward()
    buffer, values = model.module.mean, model.module.mean.clone()
    with model.averaged(), torch.no_grad():
        model(batch(0, 1) + 100)
    assert model.module.mean is buffer
    assert torch.equal(buffer, values)


def test_backward_that_steps_two_models_is_pointed_out_once(warnings_told: list[str]) -> None:
    """As in a GAN: the generator's loss goes through the critic."""
    generator, critic = (GossipDataParallel(module.double(), SGD) for module in (nn.Linear(3, 3), nn.Linear(3, 1)))
    for _ in range(2):
        critic(generator(batch(0, 0))).mean().backward()
        with critic.no_sync():
            critic(generator(batch(0, 0))).mean().backward()
        critic.optimizer.zero_grad()
    assert (generator.step, critic.step) == (4, 2)
    (line,) = warnings_told
    assert "put that one under no_sync()" in line


def test_compiled_autograd_is_refused() -> None:
    model = GossipDataParallel(make_module(), SGD)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(GossipError, match="compiled_autograd is on"),
    ):
        model(batch(0, 0))


# ------------------------------------------------------------------ among ranks


@on_ranks(3)
def test_usual_loop_works_under_adapt_then_combine() -> None:
    """zero_grad() at the top leaves the last gradients there for join(), idle_step() and closures to stumble over."""
    arguments = {"algorithm": "adapt_then_combine", "step_in_backward": False}
    model = GossipDataParallel(make_module(), SGD, "ring", **arguments)
    with model.join():
        for step in range(2 + model.rank):
            model.optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            model.optimizer.step()
    model.idle_step()
    assert model.step == 5
    model.close()

    lbfgs = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
    model = GossipDataParallel(make_module(), lbfgs, "ring", **arguments)

    def closure() -> torch.Tensor:
        model.optimizer.zero_grad()
        loss = model(batch(model.rank, 0)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        model.optimizer.step(closure)
    assert model.step == 3


@on_ranks(2)
def test_averages_wait_for_the_end_of_a_step_and_of_join() -> None:
    module = make_module()
    parts = (SGD(module[0].parameters()), SGD(module[2].parameters()))
    model = GossipDataParallel(module, parts, "ring", step_in_backward=False)
    model(batch(0, 0)).sum().backward()
    parts[0].step()
    with pytest.raises(GossipError, match="step 0 is in progress: 1 of 2 optimizers have been stepped"):
        model.global_avg()
    parts[1].step()
    with model.join(), pytest.raises(GossipError, match=r"inside join\(\) the ranks are at different steps"):
        model.global_avg()


@on_ranks(2)
def test_recalibration_that_fails_on_one_rank_is_told_on_all() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    model = GossipDataParallel(module, SGD, "ring")
    batches = [{"input": batch(0, 0)}] if model.rank == 0 else [{"no such argument": batch(0, 0)}]
    refused = pytest.raises(GossipError, match="recalibrate failed on rank 1: TypeError")
    with refused, model.averaged(recalibrate=batches):
        pass
    with model.averaged(recalibrate=[{"input": batch(0, 0)}]):
        pass


def test_a_model_that_is_collected_while_an_optimizer_steps_disturbs_nobody() -> None:
    model = GossipDataParallel(nn.Linear(2, 1), SGD)
    itself = [model]
    itself.append(itself)  # only the garbage collector finds it
    gone = weakref.ref(model)
    del model, itself
    other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)

    def collect(*_: object) -> None:
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        other.step()
    finally:
        for handle in handles:
            handle.remove()
    assert gone() is None
