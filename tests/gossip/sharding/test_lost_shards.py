"""A rank of a shard group that is killed or frozen: no other rank waits beyond the time-out, and it is named."""

import contextlib
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unsupervised
from ranks import on_ranks
from sharded_models import ADAMW, make_mesh, make_sharded
from torch import nn
from torch.distributed.fsdp import fully_shard

from gossip import ExchangeError, GossipDataParallel, GossipError, World
from gossip.private_torch import restore_collectives
from gossip.sharding.fsdp_group import watch_collectives

pytestmark = pytest.mark.slow

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
PLACES = ("before the forward", "before the backward", "in the backward")
CASES = [(how, place) for how in SIGNALS for place in PLACES]
TIMEOUT = timedelta(seconds=4)
VICTIM, PARTNER, STEP = 2, 3, 5


def make_model(timeout: timedelta) -> GossipDataParallel:
    """Two groups of two, layer by layer."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module, options = make_sharded(layers, (2, 2), parts=("0", "2"))
    return GossipDataParallel(module, ADAMW, "ring", timeout=timeout, **options)


def train_until_one_stops(how: str, place: str, timeout: timedelta) -> None:
    model = make_model(timeout)

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), SIGNALS[how])

    for step in range(30):
        is_due = dist.get_rank() == VICTIM and step == STEP
        if is_due and place == "before the forward":
            stop()
        if is_due and place == "in the backward":
            model.module[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(stop) and None)
        output = model(torch.ones(2, 4))
        if is_due and place == "before the backward":
            stop()
        output.sum().backward()


End = tuple[str, tuple[int, ...]]
"""How a rank ended: the error, and whom it blames."""


def end_of_a_survivor(how: str, place: str) -> End:
    with pytest.raises(ExchangeError) as caught:
        train_until_one_stops(how, place, TIMEOUT)
    return str(caught.value), caught.value.failed_ranks


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], list[End | None]]:
    """All worlds wait at the same time; but each trains by itself until its victim has stopped."""
    with contextlib.ExitStack() as stack:
        started = {}
        for case in CASES:
            ranks = stack.enter_context(unsupervised.started(end_of_a_survivor, *case, world_size=4))
            ranks.wait_until_stopped(VICTIM)
            started[case] = ranks
        return {case: ranks.results(silent={VICTIM}) for case, ranks in started.items()}


@pytest.mark.parametrize(("how", "place"), CASES)
def test_a_rank_that_stops_ends_all_others(
    found: dict[tuple[str, str], list[End | None]], how: str, place: str
) -> None:
    """Its own group blames it; who waits for a rank that has given up blames either."""
    ends = found[how, place]
    for rank, end in enumerate(ends):
        if rank == VICTIM:
            continue
        assert end is not None, f"rank {rank} had not ended"
        assert "step " in end[0]
        assert "gloo" not in end[0]
    text, failed_ranks = ends[PARTNER] or ("", ())
    assert failed_ranks == (VICTIM,)
    assert f"step {STEP}: " in text
    assert "within the shard group (ranks [2, 3] of the default process group)" in text
    assert f"rank 0 is {'gone' if how == 'killed' else 'frozen'}: its process" in text


class Failing:
    """Communication that this rank alone cannot make."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None:
        raise RuntimeError("out of memory")


@on_ranks(4)
def test_errors_of_this_rank_alone_stay_as_they_are_and_watching_ends() -> None:
    mesh = make_mesh(2, 2)
    module = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
    group = module._get_fsdp_state()._fsdp_param_group
    failing = group._all_gather_comm = Failing()
    world = World(TIMEOUT, mesh.get_group("shard"))
    for _ in range(2):
        watch_collectives(module, world, lambda: "step 3")
    with pytest.raises(RuntimeError, match=r"^out of memory$") as caught:
        module.unshard()
    assert not isinstance(caught.value, GossipError)
    restore_collectives(module)
    world.close()
    assert group._all_gather_comm is failing
