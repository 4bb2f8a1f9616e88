"""What a model says of itself: the cost of every step, and what was built at the start."""

import copy
import dataclasses
import functools
import json
import math
from typing import Any

import pytest
import torch
from listening import logged
from loguru import logger
from ranks import on_ranks
from replicas import gathered
from small_runs import MODES, finish, flat, loss_of, make_module, train, wrap
from torch import nn

import topologies
from gossip import GossipDataParallel, StepStats, launch
from topologies import Round, Topology

ALGORITHMS = ["adapt_while_communicating", "adapt_then_combine"]
WORLD_SIZE = 4
NUM_STEPS = 5
TIMES = ("exposed_wait_s", "forward_s", "backward_s", "update_s", "overlapped_s")
TOPOLOGIES = {
    "complete": topologies.build("complete", WORLD_SIZE),
    "ring": topologies.build("ring", WORLD_SIZE),
    "directed": topologies.build("one_peer_exponential", WORLD_SIZE),
    "pairs": topologies.build("one_peer_ring", WORLD_SIZE),
    "every third": topologies.build("ring", WORLD_SIZE).every(3),
}


# All sizes are multiples of 16 bytes, so that nothing is padded.
NUM_BYTES = 8 * sum(parameter.numel() for parameter in make_module().parameters())


def bytes_by_peer(round_: Round, rank: int) -> dict[int, int]:
    """Every reader gets all values: they are too few for an all-reduce."""
    return dict.fromkeys(round_.targets(rank), NUM_BYTES)


def check_every_step(topology: Topology, algorithm: str, mode: str) -> None:
    with wrap(make_module(), topology=topology, algorithm=algorithm, **MODES[mode]) as model:
        assert model.stats() is None
        sent = torch.from_numpy(flat(model.module))
        for step in range(NUM_STEPS):
            model.state_dict()  # what must be combined before the parameters are read is
            plain = copy.deepcopy(model.module)
            loss_of(plain, model.rank, step).backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()]).item()
            train(model, range(step, step + 1))
            stats = model.stats()
            assert stats.step == step
            assert stats.gradient_norm == pytest.approx(norm, rel=1e-12)
            assert stats.num_refused == stats.num_skipped == 0

            wanted = bytes_by_peer(topology.round(step), model.rank)
            assert stats.bytes_by_peer == wanted
            assert stats.bytes_sent == sum(wanted.values())

            # What this step combined is the round that the step before launched.
            arriving = topology.round(step - 1).neighbours(model.rank) if step else {}
            assert set(stats.wait_by_peer_s) == set(arriving)
            if topology.name == "complete" and step:
                rows = gathered(sent)
                distance = torch.linalg.vector_norm(sent - rows.mean(0)).item()
                assert distance > 1e-4
                assert stats.consensus_distance_estimate == pytest.approx(distance, rel=1e-9)
            else:
                assert (stats.consensus_distance_estimate is None) == (not arriving)
            sent = torch.from_numpy(flat(model.module))  # read as it is: combining has to wait

            assert all(math.isfinite(getattr(stats, name)) and getattr(stats, name) >= 0 for name in TIMES)
            assert all(math.isfinite(waited) and waited >= 0 for waited in stats.wait_by_peer_s.values())
            assert model.stats() == stats  # looking changes nothing
            record = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
            assert set(record) == {field.name for field in dataclasses.fields(StepStats)}
            assert record["bytes_by_peer"] == {str(peer): number for peer, number in wanted.items()}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(WORLD_SIZE)
def test_every_step_is_counted_whatever_the_mode_algorithm_and_topology(mode: str) -> None:
    for name, topology in TOPOLOGIES.items():
        for algorithm in ALGORITHMS:
            if mode == "in backward" or name in ("complete", "every third"):
                check_every_step(topology, algorithm, mode)


def test_world_of_one_sends_nothing_and_waits_for_nobody() -> None:
    model = wrap(make_module())
    assert model.stats() is None
    train(model, range(2))
    stats = model.stats()
    assert (stats.step, stats.bytes_sent, stats.exposed_wait_s, stats.overlapped_s) == (1, 0, 0.0, 0.0)
    assert stats.bytes_by_peer == stats.wait_by_peer_s == {}
    assert stats.consensus_distance_estimate is None
    assert stats.gradient_norm == model.grad_norm > 0


@pytest.mark.parametrize("mode", MODES)
def test_gradient_norm_is_that_of_all_micro_batches_and_none_without_gradients(mode: str) -> None:
    model = wrap(make_module(), **MODES[mode])
    plain = copy.deepcopy(model.module)
    for micro in range(2):
        loss_of(plain, 0, micro).backward()
    with model.no_sync():
        loss_of(model, 0, 0).backward()
    assert model.stats() is None
    loss_of(model, 0, 1).backward()
    finish(model)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()]).item()
    assert model.stats().gradient_norm == pytest.approx(norm, rel=1e-12)
    model.idle_step()
    assert model.stats().step == 1
    assert model.stats().gradient_norm is None


@on_ranks(WORLD_SIZE)
def test_consensus_distance_is_estimated_from_the_messages_alone() -> None:
    for name in ("ring", "directed", "complete"):
        for algorithm in ALGORITHMS:
            torch.manual_seed(7)  # the same module everywhere, other values on each rank below
            module = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 10)).double()
            with wrap(module, topology=TOPOLOGIES[name], algorithm=algorithm, bucket_cap_mb=1e-3) as model:
                generator = torch.Generator().manual_seed(model.rank)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
                distance, _ = model.consensus_distance()
                model.idle_step()  # sends
                assert model.stats().consensus_distance_estimate is None
                model.idle_step()  # combines
                estimates = gathered(torch.tensor(model.stats().consensus_distance_estimate, dtype=torch.float64))
                # 940 independent values a rank: an estimate's standard deviation is about 1 / sqrt(2 * 940), or 2 %.
                assert estimates.mean().item() == pytest.approx(distance, rel=0.05), (name, algorithm)
                if name == "complete":
                    assert estimates.square().mean().sqrt().item() == pytest.approx(distance, rel=1e-12)


class Wide(nn.Module):
    """Trainable in two dtypes, frozen, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)  # 1 MiB
        self.low = nn.Parameter(torch.zeros(1024, dtype=torch.bfloat16))  # 2 KiB
        self.frozen = nn.Parameter(torch.zeros(256), requires_grad=False)  # 1 KiB
        self.register_buffer("level", torch.zeros(128))  # 0.5 KiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() + self.low.float().sum()


def lines_at_the_start(carrier: str) -> list[str]:
    lines: list[Any] = []
    sink = logger.add(lambda message: lines.append(message.record), level="TRACE")
    schedule = topologies.build("complete", WORLD_SIZE)
    model = GossipDataParallel(Wide(), torch.optim.SGD, schedule, bucket_cap_mb=1, buffers="average", transport=carrier)
    num_lines = len(lines)
    model(torch.ones(1, 512)).backward()
    with model.averaged():
        pass
    model.close()
    logger.remove(sink)
    assert len(lines) == num_lines, "more was said later"
    assert [line["level"].name for line in lines] == ["INFO", "TRACE", "TRACE"][:num_lines]
    return [line["message"] for line in lines]


@pytest.mark.parametrize(
    ("carrier", "transport"),
    [
        (
            "distributed",
            "backend gloo, 2 communicators on rank 0; messages point-to-point, from 64 KiB on by all-reduce in 1 "
            "group; with 3 ranks on this machine messages from 64 KiB on go through memory",
        ),
        ("debug", "backend gloo; debug: every round point-to-point, with headers; slow"),
    ],
)
def test_what_was_built_is_said_once_by_rank_0(carrier: str, transport: str) -> None:
    (what, buckets, how), *others = launch(lines_at_the_start, carrier, world_size=WORLD_SIZE)
    assert others == [[]] * (WORLD_SIZE - 1)
    assert what == (
        "4 ranks, topology complete (period 1), AdaptWhileCommunicating(gamma=1), compression none, steps bucket by "
        "bucket in backward"
    )
    assert buckets == (
        "3 buckets: 1 MiB float32 on cpu, 2 KiB bfloat16 on cpu, buffers 0.5 KiB float32 on cpu; "
        "1 KiB of frozen parameters are not sent"
    )
    assert how == transport


def test_many_buckets_are_listed_in_one_short_line() -> None:
    with logged("TRACE") as lines:
        wrap(nn.Sequential(*(nn.Linear(7, 7) for _ in range(11)))).close()
    assert lines[0].startswith("1 rank that trains alone (gossip.launch, or torchrun and init_process_group, start sev")
    assert lines[1].startswith("22 buckets: 0.0312 KiB float32 on cpu, 0.203 KiB float32 on cpu, ")
    assert lines[1].endswith(", 14 more")
    assert len(lines) == 2  # nothing is sent: there is no transport to describe


@on_ranks(2)
def test_every_phase_has_a_range_in_the_profiler() -> None:
    model = GossipDataParallel(nn.Linear(3, 2), functools.partial(torch.optim.SGD, lr=0.1), "ring")
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
    model.close()
    counts = {"forward": 3, "backward": 3, "update": 3, "send": 3, "wait": 2, "mix": 2}
    found = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("gossip::")}
    assert found == {f"gossip::{phase}": count for phase, count in counts.items()}
