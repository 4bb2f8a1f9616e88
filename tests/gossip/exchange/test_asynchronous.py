"""Pairs of ranks average whenever one of them is ready; ``virtual/test_replays`` has what comes of it."""

import functools
import queue
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import safetensors.torch
import torch
import unsupervised
from elastic_ranks import RATE, TIMEOUT, flat, make_model, make_steps, steps_until, targets

import gossip
from gossip import Average, Recording
from gossip.elastic.connections.peer_connection import Frame, Key, Kind
from gossip.exchange.pair_averaging import PairAverager
from gossip.lab.faults.injection import Fault

NUM_STEPS = 30
RETURN_TIMEOUT = timedelta(seconds=2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9)


def train_at_rest(rank_that_dies: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Its parameters when all averages are made, their mean and the members."""
    from fault_places import injected

    faults = [Fault("kill", step=9, num_bytes=100)] if torch.distributed.get_rank() == rank_that_dies else []
    options = {"algorithm": "asynchronous", "topology": "ring"}
    with injected(faults), make_model(2**14, options) as model:
        make_steps(model, 30)
        model.consensus_distance()
        values = flat(model.module)
        model.global_avg()
        return values, flat(model.module), model.members


def test_the_others_go_on_without_one_that_dies() -> None:
    results = unsupervised.results_of(train_at_rest, 2, world_size=4)
    assert [result is None for result in results] == [False, False, True, False]
    left = [result for result in results if result is not None]
    expected = torch.stack([values for values, _, _ in left]).mean(0)
    for _, mean, members in left:
        assert members == (0, 1, 3)
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)


def leave_early(rank_that_leaves: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    model = make_model(64, {"algorithm": "asynchronous", "topology": "ring"})
    rank = torch.distributed.get_rank()
    make_steps(model, 5 if rank == rank_that_leaves else 20)
    members = model.members
    if rank == rank_that_leaves:
        model.leave()
    else:
        model.global_avg()
        members = model.members
        model.close()
    return flat(model.module), members


def test_a_rank_may_leave() -> None:
    results = unsupervised.results_of(leave_early, 1, world_size=4)
    assert [members for _, members in results] == [(0, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 2, 3)]
    for values, _ in results[2:]:
        torch.testing.assert_close(values, results[0][0], rtol=0, atol=0)


def save_and_go_on(folder: str, num_steps: Sequence[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    rank = torch.distributed.get_rank()
    with make_model(64, {"algorithm": "asynchronous", "topology": "ring", "optimizer": MOMENTUM}) as model:
        make_steps(model, num_steps[rank])
        gossip.save(model, folder, batch=7)
        saved = flat(model.module)
        make_steps(model, 3)
        checkpoint = gossip.load(model, folder)
        assert checkpoint.data["batch"] == 7
        assert checkpoint.step == max(num_steps)
        loaded, step = flat(model.module), model.step
        model(targets(rank, 64)).backward()
        return step, saved, loaded


def look_while_the_other_goes_on(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 0 stays within averaged() until rank 1 has made steps: its values before and after."""
    rank = torch.distributed.get_rank()
    with make_model(64, {"algorithm": "asynchronous", "topology": "complete", "record": folder}) as model:
        model(targets(rank, 64)).backward()
        model.consensus_distance()  # all averages are made
        before = flat(model.module)
        with model.averaged():
            if rank == 0:
                torch.distributed.barrier()
        after = flat(model.module)
        if rank == 1:
            make_steps(model, 5)
            torch.distributed.barrier()
        model.consensus_distance()
        return before, after


def test_averages_that_are_made_meanwhile_do_not_enter_what_averaged_puts_back(tmp_path: Path) -> None:
    for before, after in unsupervised.results_of(look_while_the_other_goes_on, str(tmp_path), world_size=2):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    made = [event for event in Recording.load(tmp_path).events if isinstance(event, Average)]
    assert max(average.partner_step for average in made if average.rank == 0) > 0, "rank 1 has asked for an average"


def export_and_count(folder: str) -> tuple[torch.Tensor, list[tuple[int, dict[int, int]]]]:
    """The sum of its updates, and what it says that it has sent in each step; others make other numbers of steps."""
    rank, total = torch.distributed.get_rank(), torch.zeros(2, 64, dtype=torch.float64)
    sent = []
    with make_model(64, {"algorithm": "asynchronous", "topology": "complete"}) as model:
        with model.join():
            for _ in range((20, 0, 13)[rank]):
                total -= RATE * (flat(model.module) - targets(rank, 64))
                model(targets(rank, 64)).backward()
                stats = model.stats()
                assert stats.consensus_distance_estimate is None
                sent.append((stats.bytes_sent, dict(stats.bytes_by_peer)))
        assert model.step == (20, 0, 13)[rank]
        gossip.export(model, f"{folder}/mean.safetensors")
        return total, sent


def test_an_export_is_the_exact_mean_and_all_that_is_sent_is_counted(tmp_path: Any) -> None:
    results = unsupervised.results_of(export_and_count, str(tmp_path), world_size=3)
    exported = safetensors.torch.load_file(tmp_path / "mean.safetensors")
    mean = torch.stack([total for total, _ in results]).mean(0)
    torch.testing.assert_close(torch.stack([exported["first"], exported["second"]]), mean, rtol=0, atol=1e-12)
    for rank, (_, sent) in enumerate(results):
        assert all(num_bytes == sum(by_peer.values()) for num_bytes, by_peer in sent)
        assert all(rank not in by_peer and not num % (64 * 8) for _, by_peer in sent for num in by_peer.values())
    assert sum(num_bytes for _, sent in results for num_bytes, _ in sent) > 0


def test_a_checkpoint_keeps_every_rank_at_its_own_step(tmp_path: Any) -> None:
    results = unsupervised.results_of(save_and_go_on, str(tmp_path / "checkpoints"), [4, 9, 6], world_size=3)
    assert [step for step, _, _ in results] == [4, 9, 6]
    for _, saved, loaded in results:
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def test_a_question_does_not_overtake_a_refusal() -> None:
    """Who gets a question while it waits for an answer takes it for one; so none may come before a refusal."""
    world, sent, is_awaited = mock.Mock(), list[Kind](), threading.Event()
    world.questions, world.member, world.timeout, world.mesh.lost = queue.SimpleQueue(), 1, TIMEOUT, {}
    averager = PairAverager(world)
    values = torch.zeros(4)
    showing = threading.Thread(target=lambda: averager.show(0, averager.memory(0, values), 0, partner=0))
    lock = averager._making

    class Lock:
        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                is_awaited.set()
                lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    averager._making = Lock()

    def send(_: int, key: Key, __: torch.Tensor | None = None) -> mock.Mock:
        if not sent and not showing.ident:
            showing.start()
            assert is_awaited.wait(60)
        sent.append(key.kind)
        return mock.Mock()

    world.mesh.send, world.mesh.changed = send, threading.Condition()
    averager.answer(0, Frame(Key(Kind.PAIR, 0, 0), values.clone().view(torch.uint8)))
    showing.join()
    world.questions.put(None)
    next(thread for thread in threading.enumerate() if thread.name == "gossip-averages-1").join()
    assert sent == [Kind.AVERAGE, Kind.PAIR]


class Stay(NamedTuple):
    """What a rank tells: its number in the end, its steps, those after which all did something together, the mean."""

    member: int
    steps: list[int]
    together: list[int]
    mean: torch.Tensor
    members: tuple[int, ...]


def stay(faults: Mapping[int, Fault], last: int, options: Mapping[str, Any]) -> Stay:
    """Train until there are four, rank ``last`` among them, and 60 steps more; every 20 all do something together."""
    from fault_places import injected

    steps, together = list[int](), list[int]()
    own = [fault for rank, fault in faults.items() if rank == torch.distributed.get_rank()]
    with injected(own), make_model(64, {"algorithm": "asynchronous", "topology": "complete", **options}) as model:
        target = targets(model.world.member, 64)

        def are_together_there() -> bool:
            is_there = len(model.members) == 4 and model.members[-1] == last
            return bool(together) and together[-1] == model.step and is_there

        for _ in steps_until(model, are_together_there, 60):
            steps.append(model.step)
            model(target).backward()
            if model.step % 20 == 0:
                model.consensus_distance()
                together.append(model.step)
        model.global_avg()
        return Stay(model.world.member, steps, together, flat(model.module), model.members)


def test_ranks_join() -> None:
    """They do the same things together from their first step on as the others, whatever steps these make beside."""
    options = {"min_ranks": 1}
    with unsupervised.started(stay, {}, 3, options, world_size=2) as ranks:
        for _ in range(2):
            ranks.join(stay, {}, 3, options)
        results: list[Stay] = [result for result in ranks.results() if result is not None]
    assert len(results) == 4
    for joined in results:
        assert joined.members == tuple(range(4))
        assert joined.steps[0] == 0 or joined.member >= 2
        assert joined.together == [step for step in results[0].together if step > joined.steps[0]]
        torch.testing.assert_close(joined.mean, results[0].mean, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), [("freeze", 25), ("cut", 40)])  # all do something together at 40
def test_a_rank_that_was_given_up_comes_back(kind: Any, step: int) -> None:
    """In its own process and within its loop: it does what all do together as the others do, from then on."""
    faults, options = {1: Fault(kind, step=step, duration_s=6.0)}, {"partition_timeout": 30, "timeout": RETURN_TIMEOUT}
    results: list[Stay] = unsupervised.results_of(stay, faults, 4, options, world_size=4)
    assert [each.member for each in results] == [0, 4, 2, 3]
    for each in results:
        torch.testing.assert_close(each.mean, results[0].mean, rtol=0, atol=0)
    back, others = results[1], [results[0], results[2], results[3]]
    for each in others:
        assert each.together == others[0].together
        assert each.steps == list(range(len(each.steps))), "nobody else missed or repeated a step"
    gap = next(place for place, number in enumerate(back.steps) if number != place)
    after = [number for number in back.together if number > gap]
    assert after
    assert after == others[0].together[-len(after) :]
