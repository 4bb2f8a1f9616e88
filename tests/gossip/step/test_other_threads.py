"""Forward passes in other threads: a monitor, an actor that plays while the learner's backward pass runs, or dies."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import on_ranks
from replicas import SGD
from small_runs import TINY_BUCKETS, assert_same, batch, finish
from torch import nn

from gossip import GossipDataParallel, GossipError

NUM_STEPS = 3
MODES: dict[str, dict[str, Any]] = {
    "in backward": {},
    "clip global": {"clip_grad_norm": 0.1},
    "outside": {"step_in_backward": False},
    "then": {"algorithm": "adapt_then_combine"},
    "then, clip global": {"algorithm": "adapt_then_combine", "clip_grad_norm": 0.1},
}
KINDS = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "with gradients": nullcontext}


class Meanwhile(nn.Module):
    """Calls ``meanwhile`` in the middle of each backward pass, after gradients of the second layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.meanwhile: Callable[[], object] = int
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(self.call)
        return self.second(hidden)

    def call(self, _: torch.Tensor) -> None:
        self.meanwhile()


def in_another_thread(function: Callable[[], object]) -> None:
    """Call it there and wait until it has ended, as it should: an exception is raised here."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


def wrap(module: nn.Module, mode: str = "in backward") -> GossipDataParallel:
    return GossipDataParallel(module, SGD, "ring", bucket_cap_mb=TINY_BUCKETS, **MODES[mode])


def train(mode: str, kind: str | None) -> list[torch.Tensor]:
    module = Meanwhile()
    model = wrap(module, mode)
    counts = []

    def watch() -> None:
        with KINDS[kind]():
            counts.append(len(model(batch(0, 100))))

    if kind is not None:
        module.meanwhile = lambda: in_another_thread(watch)
    for step in range(NUM_STEPS):
        model(batch(model.rank, step)).square().mean().backward()
        finish(model)
    assert model.step == NUM_STEPS
    assert len(counts) == (0 if kind is None else NUM_STEPS)
    model.state_dict()
    return [parameter.detach().clone() for parameter in module.parameters()]


@on_ranks(2)
def test_forward_in_another_thread_while_backward_runs_changes_nothing() -> None:
    for mode in MODES:
        alone = train(mode, None)
        for kind in KINDS:
            assert all(map(torch.equal, train(mode, kind), alone)), (mode, kind)


def test_step_or_average_in_another_thread_while_backward_runs_is_refused() -> None:
    module = Meanwhile()
    model = wrap(module, "clip global")
    refused = []

    def call(name: str) -> None:
        with pytest.raises(GossipError, match="a backward pass is running in another thread") as caught:
            getattr(model, name)()
        refused.append(str(caught.value))

    for name in ("idle_step", "global_avg", "consensus_distance"):
        module.meanwhile = lambda name=name: in_another_thread(lambda: call(name))
        model(batch(0, 0)).square().mean().backward()
    assert (model.step, len(refused)) == (3, 3)


def divide_by_zero() -> None:
    raise ZeroDivisionError


GOING_ON: dict[str, Callable[[GossipDataParallel], object]] = {
    "forward": lambda model: model(batch(0, 0)),
    "forward elsewhere": lambda model: in_another_thread(lambda: model(batch(0, 0))),
    "idle_step": lambda model: model.idle_step(),
    "global_avg": lambda model: model.global_avg(),
}


@pytest.mark.parametrize("going_on", GOING_ON.values(), ids=GOING_ON)
def test_backward_that_died_after_a_send_ends_training(going_on: Callable[[GossipDataParallel], object]) -> None:
    module = Meanwhile()
    module.meanwhile = divide_by_zero
    model = wrap(module)
    with pytest.raises(ZeroDivisionError):
        in_another_thread(lambda: model(batch(0, 0)).sum().backward())
    for _ in range(2):
        with pytest.raises(GossipError, match="the backward pass of step 0 was ended by an exception"):
            going_on(model)


def test_backward_that_died_before_anything_was_sent_is_forgotten() -> None:
    module, plain = Meanwhile(), Meanwhile()
    module.meanwhile = divide_by_zero
    model = GossipDataParallel(module, SGD)  # one bucket: it waits for the first layer
    with pytest.raises(ZeroDivisionError):
        model(batch(0, 0)).sum().backward()
    module.meanwhile = int
    for each in (model, plain):
        each(batch(0, 0)).sum().backward()
    SGD(plain.parameters()).step()
    assert model.step == 1
    assert_same(model, plain)


@on_ranks(2)
def test_forward_waits_for_values_that_another_thread_is_combining() -> None:
    """The other thread is awaiting messages, when this one's forward pass wants to read the parameters."""
    module, plain = Meanwhile(), Meanwhile()
    model = GossipDataParallel(module, SGD, "ring", algorithm="adapt_then_combine")
    model(batch(model.rank, 0)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    engine = model._engine
    is_awaiting, is_wanted = threading.Event(), threading.Event()
    combine_, lock = engine.exchanges.combine_, engine._lock

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is threading.main_thread():
                is_wanted.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def combine_slowly_(index: int, meter: Any) -> None:
        engine.exchanges.combine_ = combine_
        taken, engine.exchanges.in_flight[index] = engine.exchanges.in_flight[index], None
        is_awaiting.set()
        assert is_wanted.wait(60)
        engine.exchanges.in_flight[index] = taken
        combine_(index, meter)

    engine.exchanges.combine_, engine._lock = combine_slowly_, Lock()
    with torch.no_grad():
        actor = threading.Thread(target=lambda: model(batch(0, 0)))
        actor.start()
        assert is_awaiting.wait(60)
        found = model(batch(0, 0))
        actor.join()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(found, plain(batch(0, 0)))
    assert not all(map(torch.equal, before, module.parameters()))
    model.close()
