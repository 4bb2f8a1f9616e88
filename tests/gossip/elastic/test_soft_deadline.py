"""A step waits no longer than its soft deadline, and what comes later is mixed in then: the mean stays exact."""

import functools
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import unsupervised
from elastic_ranks import RATE, Dropped, assert_repeated, dropped_of, flat, make_model, targets
from fault_places import injected
from tiers import rest_is_slow

import gossip
import topologies
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange.edge_transport import make_generation_transport
from gossip.exchange.late_messages import MOST_LATE, LateMessages
from gossip.exchange.recording import Missed
from gossip.lab.faults.injection import Fault

NUMEL = 64


class Course(NamedTuple):
    """What a rank tells."""

    values: list[torch.Tensor]  # by step, its parameters before it, and in the end, when nothing is late any more
    mean: torch.Tensor
    num_late: int  # as the stats count them
    total: torch.Tensor  # the sum of its updates
    delayed: Dropped  # by step and bucket, whose messages were not waited for
    mixed: list[tuple[int, ...]]  # step of the message, bucket, and the step in which it was mixed in


def subtract_(total: torch.Tensor, gradient: torch.Tensor) -> None:
    total.sub_(gradient, alpha=RATE)


def train(num_steps: int, faults: dict[int, Fault], options: dict[str, Any]) -> Course:
    rank = torch.distributed.get_rank()
    values, num_late, total = [], 0, torch.zeros(2, NUMEL, dtype=torch.float64)
    with injected([faults[rank]] if rank in faults else []), make_model(NUMEL, options) as model:
        for parameter, row in zip(model.parameters(), total, strict=True):
            parameter.register_hook(functools.partial(subtract_, row))
        for _ in range(num_steps):
            values.append(flat(model.module))
            model(targets(rank, NUMEL)).backward()
            if not options.get("step_in_backward", True):
                model.optimizer.step()
                model.optimizer.zero_grad()
            stats = model.stats()
            num_late += stats.num_late if stats is not None else 0
        model.consensus_distance()
        values.append(flat(model.module))
        model.global_avg()
        return Course(values, flat(model.module), num_late, total, {}, [])  # what was late is in the recording


def run(num_steps: int, faults: dict[int, Fault], **options: Any) -> list[Course]:
    with tempfile.TemporaryDirectory() as folder:
        recorded = options | {"record": folder}
        results: list[Course] = unsupervised.results_of(train, num_steps, faults, recorded, world_size=4)
        recording = gossip.Recording.load(folder)
    if "algorithm" not in options:  # values are those before forward passes, which others may change
        stories = {rank: dict(enumerate(one.values)) for rank, one in enumerate(results) if one is not None}
        assert_repeated(recording, stories, NUMEL, **options)
    # What is late in global_avg(), after the last step, is dropped with all that is in flight.
    events = [event for event in recording.events if isinstance(event, Missed) and event.step < num_steps - 1]
    delayed = dropped_of(gossip.Recording(events, []))
    mixed = [[event[1:3] + event[4:5] for event in events if event.rank == n and event.entered >= 0] for n in range(4)]
    return [one and one._replace(delayed=delayed[n], mixed=mixed[n]) for n, one in enumerate(results)]


def dense(courses: list[Course], num_steps: int, topology: topologies.Topology) -> list[list[np.ndarray]]:
    """By step and rank; a message that was late is mixed in against the rank's own of its round."""
    n = len(courses)
    goal = [targets(rank, NUMEL).numpy() for rank in range(n)]
    x = [np.zeros((2, NUMEL)) for _ in range(n)]
    sent: list[list[np.ndarray]] = []
    by_step = []
    for step in range(num_steps + 1):
        by_step.append([values.copy() for values in x])
        before = [values.copy() for values in x]
        for rank, course in enumerate(courses):
            for parameter in range(2):
                if step < num_steps and step > 0:  # what was sent in the step before
                    matrix = topology.round(step - 1).matrix()
                    for other in range(n):
                        if other not in course.delayed.get((step - 1, 1 - parameter), ()):
                            difference = sent[step - 1][other][parameter] - sent[step - 1][rank][parameter]
                            x[rank][parameter] += matrix[rank, other] * difference
                for round_index, bucket, mixed_at in course.mixed:
                    if (bucket, mixed_at) == (1 - parameter, step):
                        matrix = topology.round(round_index).matrix()
                        (other,) = course.delayed[round_index, bucket]
                        difference = sent[round_index][other][parameter] - sent[round_index][rank][parameter]
                        x[rank][parameter] += matrix[rank, other] * difference
            if step < num_steps:
                x[rank] -= RATE * (before[rank] - goal[rank])
            else:
                by_step[-1][rank] = x[rank].copy()
        sent.append([values.copy() for values in x])
    return by_step


@pytest.mark.parametrize(("num_steps", "soft_deadline"), rest_is_slow([(12, 0.05), (28, "auto")]))
def test_what_comes_late_is_mixed_later_as_in_the_dense_recursion(num_steps: int, soft_deadline: float | str) -> None:
    topology, fault = "one_peer_exponential", Fault("delay", step=num_steps - 9, duration_s=1.0)
    courses = run(num_steps, {1: fault}, topology=topology, soft_deadline=soft_deadline)
    assert any(course.delayed for course in courses)
    for course in courses:
        assert sorted((step, bucket) for step, bucket, _ in course.mixed) == sorted(course.delayed)
        assert course.num_late <= len(course.mixed), "what is mixed in after the last step belongs to none"
    expected = dense(courses, num_steps, topologies.build(topology, 4))
    for now in range(num_steps + 1):
        for place, course in enumerate(courses):
            np.testing.assert_allclose(
                course.values[now], expected[now][place], atol=1e-12, err_msg=f"step {now}, rank {place}"
            )
    assert_mean_is_exact(courses)


def test_a_step_waits_as_long_as_messages_usually_take() -> None:
    late, clock = LateMessages(mock.Mock(), "auto"), mock.Mock()
    with mock.patch("gossip.exchange.edge_transport.time.monotonic", clock):
        for member, delays in {1: [1, 2, 3, 5, 9], 2: [2]}.items():
            for number in range(70):  # of which 64 count
                assert (late.ends_at(0, 100.0, [member]) is None) == (member == 1 and number < 8)
                clock.return_value = 50.0 + delays[number % len(delays)] if number > 5 else 1000.0
                late.note_arrival(0, member, 50.0)
    assert late.ends_at(0, 100.0, [2]) == 102.0
    assert late.ends_at(0, 100.0, [1, 2]) == 100.0 + 3 + 5 * 2
    assert late.ends_at(1, 100.0, [1]) is None
    later = LateMessages(mock.Mock(), "auto", late)  # of the next generation, with a member of which little is known
    assert later.ends_at(0, 100.0, [2]) == 102.0
    assert later.ends_at(0, 100.0, [2, 3]) == 102.0


def test_what_is_known_of_peers_outlives_a_generation() -> None:
    make = functools.partial(
        make_generation_transport,
        mock.Mock(spec=ElasticWorld, member=0, shared=None),
        topologies.build("ring", 3),
        algorithm=gossip.AdaptWhileCommunicating(),
        compression=gossip.Uncompressed(),
        soft_deadline_s="auto",
    )
    before: Any = make(members=[0, 1, 2])
    for _ in range(8):
        before.late_messages.note_arrival(0, 1, 0.0)
    after: Any = make(members=[0, 1, 3], before=before)
    assert after.late_messages.ends_at(0, 0.0, [1, 3]) is not None
    assert after.late_messages._awaited == {}, "what was late has been mixed in before"


def test_a_peer_that_is_always_late_is_waited_for() -> None:
    world, clock = mock.Mock(), mock.Mock(return_value=10.0)
    world.consensus.position = (0, 9, 0)
    world.wait_until = lambda look, *_, **__: look()
    late, own = LateMessages(world, "auto"), torch.ones(4)
    with mock.patch("gossip.exchange.edge_transport.time.monotonic", clock):
        for step in range(8):
            late.await_later(0, 1, Key(Kind.MESSAGE, step), 0.5, own, 7.0)
            assert late.ends_at(0, 100.0, [1]) is None
            world.mesh.take = lambda *_: torch.zeros(16, dtype=torch.uint8)
            list(late.arrived(0, waits=True))
    assert late.ends_at(0, 100.0, [1]) == 103.0


def assert_mean_is_exact(courses: list[Course]) -> None:
    mean = torch.stack([course.values[-1] for course in courses]).mean(0)
    updates = torch.stack([course.total for course in courses]).mean(0)
    torch.testing.assert_close(mean, updates, rtol=0, atol=1e-12)
    for course in courses:
        torch.testing.assert_close(course.mean, mean, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_no_more_than_a_few_are_late_at_a_time() -> None:
    """With a peer that is late by far more than a few steps the others wait again."""
    courses = run(30, {1: Fault("delay", step=3, duration_s=1.0)}, topology="ring", soft_deadline=0.01)
    for course in courses:
        for bucket in range(2):
            late = [step for step, other in course.delayed if other == bucket]
            mixed_at = {step: at for step, other, at in course.mixed if other == bucket}
            assert all(sum(first <= step < mixed_at[first] for first in late) <= 2 * MOST_LATE for step in late)
    assert max(len(course.delayed) for course in courses) >= MOST_LATE


@pytest.mark.parametrize(
    "options",
    rest_is_slow(
        [
            {"compression": "bf16", "topology": "one_peer_exponential"},
            {"algorithm": "adapt_then_combine"},
            {"step_in_backward": False},
        ]
    ),
)
def test_the_mean_is_exact_with_other_options(options: dict[str, Any]) -> None:
    courses = run(
        24, {1: Fault("delay", step=3, duration_s=1.0)}, **{"topology": "ring", "soft_deadline": 0.03} | options
    )
    assert any(course.num_late for course in courses)
    assert_mean_is_exact(courses)


def save_late(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean after saving, and the sum of its updates; on the way to it, each rank looks at its state alone."""
    rank, total = torch.distributed.get_rank(), torch.zeros(2, NUMEL, dtype=torch.float64)
    options = {"topology": "ring", "soft_deadline": 0.02}
    with injected([Fault("delay", step=5, duration_s=0.4)] if rank == 1 else []), make_model(NUMEL, options) as model:
        for _ in range(6):
            total -= RATE * (flat(model.module) - targets(rank, NUMEL))
            model(targets(rank, NUMEL)).backward()
        model._engine.state_dict()  # type: ignore[union-attr]
        gossip.save(model, folder)
        model.global_avg()
        return flat(model.module), total


def load_saved(folder: str) -> torch.Tensor:
    with make_model(NUMEL, {"topology": "ring", "soft_deadline": 0.02}) as model:
        gossip.load(model, folder)
        model.global_avg()
        return flat(model.module)


def test_a_checkpoint_holds_what_was_late(tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoints")
    saved = unsupervised.results_of(save_late, folder, world_size=4)
    loaded = unsupervised.results_of(load_saved, folder, world_size=4)
    expected = torch.stack([total for _, total in saved]).mean(0)
    for (mean, _), again in zip(saved, loaded, strict=True):
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_rank_that_is_late_may_die() -> None:
    deaths = {1: Fault("delay", step=3, duration_s=5.0), 2: Fault("kill", step=6)}
    results = run(14, deaths, topology="ring", soft_deadline=0.02)
    assert [result is None for result in results] == [False, False, True, False]
    left = [result for result in results if result is not None]
    mean = torch.stack([course.values[-1] for course in left]).mean(0)
    for course in left:
        torch.testing.assert_close(course.mean, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_late_stays_as_it_is_until_it_has_been_mixed_in(dtype: torch.dtype) -> None:
    """Its memory is used for the next message as soon as it is given back."""
    key = Key(Kind.MESSAGE, 3)
    payloads = {(1, key): torch.full((4,), 5.0, dtype=dtype).view(torch.uint8)}
    world = mock.Mock()
    world.consensus.position = (0, 4, 0)
    world.wait_until = lambda look, *_, **__: look()
    world.mesh.take = lambda member, asked: payloads.pop((member, asked), None)
    world.mesh.give_back = lambda given: [payload.fill_(0) for payload in given]
    late = LateMessages(world, 1.0)
    late.await_later(0, 1, key, 0.25, torch.ones(4, dtype=dtype), 0.0)
    ((_, difference, note),) = [
        found._replace(difference=found.difference.clone()) for found in late.arrived(0, waits=True)
    ]
    torch.testing.assert_close(difference, torch.ones(4, dtype=torch.float64), rtol=0, atol=0)
    world.record.assert_not_called()  # it may be dropped, as by close()
    note(True)
    world.record.assert_called_once_with(Missed(world.member, 3, 0, 1, 4, True))
