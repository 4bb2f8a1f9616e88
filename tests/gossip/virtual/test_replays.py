"""Virtual workers replay what ranks did, or are predicted to do, that do not make their steps together."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import unsupervised
from elastic_ranks import RATE, TIMEOUT, Pair, flat, targets

import gossip
import topologies
from gossip import Asynchronous, Average, Cluster, GossipDataParallel, GossipError, Recording, VirtualWorkers, Workload

NUMEL = 16
BUCKETS_MB = NUMEL * 8 / 2**20
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain sgd": functools.partial(torch.optim.SGD, lr=RATE),
    "sgd": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1),
}


def noisy(rank: int, step: int) -> torch.Tensor:
    """A sample: [2, numel]."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return targets(rank, NUMEL) + torch.randn(2, NUMEL, generator=generator, dtype=torch.float64)


def train(num_steps: Sequence[int], optimizer: str, rests: bool) -> tuple[list[Average], torch.Tensor]:
    rank, history = torch.distributed.get_rank(), list[Average]()
    model = GossipDataParallel(
        Pair(NUMEL),
        OPTIMIZERS[optimizer],
        "complete",
        algorithm=Asynchronous(history=history),
        on_peer_loss="continue",
        bucket_cap_mb=BUCKETS_MB,
        timeout=TIMEOUT,
    )
    for step in range(num_steps[rank]):
        model(noisy(rank, step)).backward()
        if rests and step == 3:
            model.consensus_distance()
    model.consensus_distance()
    values = flat(model.module)
    model.close()
    return history, values


def replay(recording: Recording, optimizer: str) -> torch.Tensor:
    """All replicas' values, [n, 2, numel]."""
    workers = VirtualWorkers(
        Rows(NUMEL),
        len(recording.num_steps),
        OPTIMIZERS[optimizer],
        algorithm=Asynchronous(replay=recording),
        bucket_cap_mb=BUCKETS_MB,
        loss_reduction="sum",
        devices=["cpu"],
    )
    while any(step is not None for step in workers.next_steps):
        samples = [noisy(rank, 0 if step is None else step) for rank, step in enumerate(workers.next_steps)]
        workers(torch.stack(samples)).sum().backward()
    return torch.stack([stack.detach() for stack in workers.parameters()], 1)


class Rows(Pair):
    """Of a batch of one sample."""

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return super().forward(target[0])[None]


@pytest.mark.parametrize(("optimizer", "rests"), [("plain sgd", False), ("sgd", True), ("adamw", False)])
def test_a_replay_is_the_run(optimizer: str, rests: bool) -> None:
    num_steps = [6, 25, 11, 40]
    results = unsupervised.results_of(train, num_steps, optimizer, rests, world_size=4)
    recording = Recording([average for history, _ in results for average in history], num_steps)
    assert any(average.is_read for average in recording.averages if average.entered < 6) or not rests
    found = replay(recording, optimizer)
    torch.testing.assert_close(found, torch.stack([values for _, values in results]), rtol=0, atol=1e-11)


def simulated(**options: Any) -> Recording:
    workload = Workload(0.01, 0.02, (8 * NUMEL,) * 2, stragglers=(gossip.SlowRank(0, 2.0),), jitter=0.1)
    cluster = Cluster(4, latency_us=500)
    return gossip.simulate_averages(topologies.build("ring", 4), cluster, workload, 100, seconds=1.2, **options)


def test_a_predicted_run_can_be_made() -> None:
    recording = simulated()
    slow, *fast = recording.num_steps
    assert slow == pytest.approx(20, abs=2)
    assert all(steps == pytest.approx(2 * slow, rel=0.15) for steps in fast)
    found = replay(recording, "sgd")
    again = replay(simulated(), "sgd")
    assert (found == again).all()
    distance = (found - found.mean(0)).square().sum().sqrt()
    alone = replay(Recording([], recording.num_steps), "sgd")
    assert distance < 0.5 * (alone - alone.mean(0)).square().sum().sqrt()


@pytest.mark.parametrize(
    ("recording", "options", "text"),
    [
        (Recording([], [1, 1]), {}, "replay is a recording of 2 ranks, but world_size is 3"),
        (Recording([Average(0, 0, 7, 1, 0, 1)], [1, 1, 1]), {}, "replay names bucket 7, but the model has 2"),
        (Recording([], [1, 1, 1]), {"buffers": "average"}, "replay: a recording only covers parameters"),
    ],
)
def test_what_cannot_be_replayed_is_refused(recording: Recording, options: dict[str, Any], text: str) -> None:
    module = Rows(NUMEL)
    module.register_buffer("count", torch.zeros(3))
    with pytest.raises(ValueError, match=text):
        VirtualWorkers(
            module,
            3,
            OPTIMIZERS["sgd"],
            algorithm=Asynchronous(replay=recording),
            bucket_cap_mb=BUCKETS_MB,
            devices=["cpu"],
            **options,
        )


def test_a_replay_is_not_saved(tmp_path: Any) -> None:
    algorithm = Asynchronous(replay=Recording([], [2, 2]))
    workers = VirtualWorkers(Rows(NUMEL), 2, OPTIMIZERS["sgd"], "ring", algorithm=algorithm, devices=["cpu"])
    with pytest.raises(GossipError, match="a replay can be neither saved nor loaded"):
        gossip.save(workers, tmp_path)


def test_optimizers_with_other_counters_are_refused() -> None:
    algorithm = Asynchronous(replay=Recording([], [2, 2]))
    optimizer = functools.partial(torch.optim.NAdam, lr=RATE)
    workers = VirtualWorkers(
        Rows(NUMEL), 2, optimizer, "ring", algorithm=algorithm, loss_reduction="sum", devices=["cpu"]
    )
    with pytest.raises(ValueError, match="NAdam keeps 'mu_product', which all replicas share"):
        workers(torch.stack([noisy(0, 0), noisy(1, 0)])).sum().backward()


def test_a_recording_that_contradicts_itself_is_refused() -> None:
    recording = Recording([Average(0, 0, 0, 1, 5, 1)], [3, 3])
    with pytest.raises(GossipError, match="the recording contradicts itself"):
        replay(recording, "sgd")


def test_an_answer_may_be_as_late_as_its_bucket_allows() -> None:
    """Rank 0 makes step 2 of bucket 0 before it has an answer that it asked for after step 0, in bucket 1."""
    late = Average(0, 0, 1, 1, 3, entered=2), Average(1, 3, 1, 0, 0, entered=4)
    meanwhile = Average(0, 2, 0, 1, 1, entered=3), Average(1, 1, 0, 0, 2, entered=2)
    found = replay(Recording([*late, *meanwhile], [6, 6]), "plain sgd")
    alone = replay(Recording([], [6, 6]), "plain sgd")
    assert not torch.equal(found, alone)
