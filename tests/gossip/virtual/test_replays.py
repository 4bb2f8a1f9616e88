"""Virtual workers replay what ranks did that do not make their steps together."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import unsupervised
from elastic_ranks import RATE, Pair, flat, make_model, make_workers, targets, values_of
from tiers import rest_is_slow

import gossip
from gossip import Average, GossipError, Recording

NUMEL = 16
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain sgd": functools.partial(torch.optim.SGD, lr=RATE),
    "sgd": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1),
}


def noisy(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    """A sample: [2, numel]."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return targets(rank, numel) + torch.randn(2, numel, generator=generator, dtype=torch.float64)


def train(
    topology: str, optimizer: str, num_steps: Sequence[int], numel: int, rests: bool, folder: str
) -> torch.Tensor:
    """The higher the rank, the slower it is."""
    rank = torch.distributed.get_rank()
    options = {"topology": topology, "optimizer": OPTIMIZERS[optimizer], "algorithm": "asynchronous", "record": folder}
    with make_model(numel, options) as model:
        for step in range(num_steps[rank]):
            sample = noisy(rank, step, numel)
            for _ in range(30 * rank):
                model.module(sample)
            model(sample).backward()
            if rests and step == 3:
                model.consensus_distance()
        model.consensus_distance()
        return flat(model.module)


def replay(recording: Recording, optimizer: str, numel: int = NUMEL) -> torch.Tensor:
    """All replicas' values, [n, 2, numel]."""
    workers = make_workers(recording, numel, algorithm="asynchronous", optimizer=OPTIMIZERS[optimizer])
    while any(step is not None for step in workers.next_steps):
        samples = [noisy(rank, 0 if step is None else step, numel) for rank, step in enumerate(workers.next_steps)]
        workers(torch.stack(samples)).sum().backward()
    return values_of(workers)


@pytest.mark.parametrize(
    ("topology", "optimizer", "num_steps", "numel", "rests"),
    rest_is_slow(
        [
            ("ring", "plain sgd", [6, 25, 11, 40], NUMEL, False),
            ("complete", "sgd", [6, 25, 11, 40], NUMEL, True),
            ("random_matching", "adamw", [6, 25, 11, 40], NUMEL, False),
            ("one_peer_exponential", "plain sgd", [30] * 5, 2**17, False),
        ],
        3,
    ),
)
def test_a_replay_is_the_run(
    topology: str, optimizer: str, num_steps: list[int], numel: int, rests: bool, tmp_path: Path
) -> None:
    arguments = topology, optimizer, num_steps, numel, rests, str(tmp_path)
    results = unsupervised.results_of(train, *arguments, world_size=len(num_steps))
    recording = Recording.load(tmp_path)
    assert recording.num_steps == num_steps
    made = [event for event in recording.events if isinstance(event, Average)]
    ends = {(average.rank, average.step, average.partner, average.partner_step, average.bucket) for average in made}
    assert ends == {(partner, theirs, rank, own, bucket) for rank, own, partner, theirs, bucket in ends}
    assert len(ends) == len(made)
    assert all(average.step < average.entered <= num_steps[average.rank] for average in made)
    assert any(average.is_read for average in made if average.entered < 6) or not rests
    found = replay(recording, optimizer, numel)
    torch.testing.assert_close(found, torch.stack(results), rtol=0, atol=1e-11)


def test_a_replay_is_not_saved(tmp_path: Any) -> None:
    workers = make_workers(Recording([], [2, 2]), NUMEL, algorithm="asynchronous")
    with pytest.raises(GossipError, match="a replay can be neither saved nor loaded"):
        gossip.save(workers, tmp_path)


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


def test_adam_counts_the_updates_of_each_rank() -> None:
    """Ranks that never meet are as many plain trainings; the second one has no sample in its third step."""
    workers = make_workers(Recording([], [6, 6]), NUMEL, algorithm="asynchronous", optimizer=OPTIMIZERS["adamw"])
    alone = [Pair(NUMEL) for _ in range(2)]
    optimizers = [OPTIMIZERS["adamw"](list(module.parameters())) for module in alone]
    for step in range(6):
        ranks = range(1 if step == 2 else 2)
        samples = [noisy(rank, step) for rank in ranks]
        workers(torch.stack(samples)).sum().backward()
        for rank, sample in zip(ranks, samples, strict=True):
            optimizers[rank].zero_grad()
            alone[rank](sample).backward()
            optimizers[rank].step()
    torch.testing.assert_close(values_of(workers), torch.stack([flat(module) for module in alone]), rtol=0, atol=1e-12)
