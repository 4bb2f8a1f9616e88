"""Recordings of ranks that make their steps together, and what virtual workers make of them.

That the values are those of the run is checked wherever ranks are lost, late, leave and join, in ``elastic_ranks``.
"""

import errno
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import elastic_ranks
import pytest
import torch
import unsupervised
from elastic_ranks import RATE, Rows, flat, make_model, make_steps, replay, run, targets, values_of

import gossip
import topologies
from gossip import Average, GossipError, Recording, VirtualWorkers
from gossip.exchange.recording import Agreed, Ended, Event, Idle, Joined, Members, Missed, Recorder
from gossip.lab.faults.injection import Fault

NUMEL = 16


def begun(*events: Event, num_ranks: int = 3, num_buckets: int = 2) -> Recording:
    """Of three ranks, or of others beside them that join."""
    return Recording([Members(0, 0, 0, [0, 1, 2], "base", num_buckets), *events], [9] * num_ranks)


def make_workers(recording: Recording, topology: Any = "ring", **options: Any) -> VirtualWorkers:
    return elastic_ranks.make_workers(recording, NUMEL, topology=topology, **options)


def make_step(workers: VirtualWorkers) -> torch.Tensor:
    """The replicas' values after it, [n, 2, numel]."""
    workers(torch.stack([targets(rank, NUMEL) for rank in range(workers.world_size)])).sum().backward()
    return values_of(workers)


def test_a_second_replay_has_the_bits_of_the_first() -> None:
    """A rank dies in mid-message, another one joins; Adam counts the steps of each rank by itself."""
    options = {"topology": "one_peer_exponential", "optimizer": functools.partial(torch.optim.AdamW, lr=RATE)}
    ends = {1: Fault(step=6, bucket=1, num_bytes=40)}  # not rank 0, which gives rank 4 its state
    outcome = run((0, 2, 3, 4), num_joining=1, ends=ends, min_ranks=2, **options)
    num_steps = outcome.longest.first_step + len(outcome.longest.values) - 3  # then ranks close their models in turns
    *_, (_, again) = replay(outcome.recording, 64, num_steps, **options)
    *_, (workers, values) = replay(outcome.recording, 64, num_steps, **options)
    assert torch.equal(values, again)
    left = [0, 2, 3, 4]
    assert workers.next_steps == [None if rank == 1 else num_steps for rank in range(5)]
    mean = values[left].mean(0)
    distance = (values[left] - mean).square().flatten(1).sum(1).mean().sqrt()
    assert workers.consensus_distance()[0] == pytest.approx(float(distance), rel=1e-12)
    with workers.averaged() as module:
        torch.testing.assert_close(flat(module), mean, rtol=0, atol=1e-12)


def test_ranks_without_an_update_are_mixed_nevertheless() -> None:
    workers, idle = make_workers(begun()), make_workers(begun(Idle(1, 0)))
    assert torch.equal(make_step(workers)[[0, 2]], (first := make_step(idle))[[0, 2]])
    assert not first[1].any()
    assert make_step(idle)[1].any()


def test_what_was_missed_of_parameters_that_were_unfrozen_meanwhile() -> None:
    found = []
    for events in ([], [Missed(0, 1, 1, 2)]):  # the bucket that comes with step 1
        module = Rows(NUMEL)
        module.second.requires_grad_(False)
        workers = make_workers(begun(*events, num_buckets=1), module=module)
        make_step(workers)
        dict(workers.named_parameters())["second"].requires_grad_(True)
        make_step(workers)
        found.append(make_step(workers).clone())
    whole, missed = found
    assert torch.equal(whole[:, 0], missed[:, 0])
    assert [torch.equal(*rows) for rows in zip(whole[:, 1], missed[:, 1], strict=True)] == [False, True, True]


def test_edges_that_the_topology_does_not_have_are_refused() -> None:
    workers = make_workers(begun(Missed(0, 0, 1, 3), Members(1, 9, 1, [0, 1, 2, 3], "base", 2), num_ranks=4))
    with pytest.raises(ValueError, match="names edges that the topology does not have"):
        make_step(workers)


@pytest.mark.parametrize("agreed", [(), (1, 2), (0, 1, 2)])
def test_what_ranks_keep_alike_is_averaged_where_they_agreed_on_it(agreed: tuple[int, ...]) -> None:
    """Rank 0 has missed a message of an exact average, so its anchor is another one."""
    events = [Missed(0, 0, 1, 1), Members(1, 1, 1, [0, 1, 2], "base", 2), *(Agreed(rank, 1, 1) for rank in agreed)]
    workers = make_workers(begun(*events), "complete", algorithm=gossip.DiLoCo(period=1))
    make_step(workers)
    anchor = workers._exchanges.views(1)[0].kept["anchor"]
    alike = [[torch.allclose(anchor[one], anchor[other], atol=1e-12) for other in range(3)] for one in range(3)]
    assert alike[0][1:] == [len(agreed) == 3] * 2
    assert alike[1][2]


def test_a_rank_that_joined_counts_in_what_ranks_keep_alike_once_it_has_agreed() -> None:
    """Rank 3 joins in a generation that ends before it agrees, so that the next one is agreed on without its part."""
    everyone = [0, 1, 2, 3]
    events = [Joined(3, 0, 0), *(Members(0, step, step, everyone, "base", 2) for step in (1, 2, 3))]
    events += [Agreed(rank, step, step) for rank in everyone for step in (2, 3)]
    workers = make_workers(begun(*events, num_ranks=4), "complete", algorithm=gossip.DiLoCo(period=4))
    anchor = workers._exchanges.views(1)[0].kept["anchor"]
    make_step(workers)
    for mean in (2.0, 2.5):
        anchor.copy_(torch.arange(1.0, 5.0)[:, None])
        make_step(workers)
        assert torch.equal(anchor, torch.full_like(anchor, mean))


class Standing(torch.nn.Module):
    """Its ``other`` gets a gradient in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2, dtype=torch.float64)
        self.other = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.uses_other = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.norm(batch).square() * batch
        return (found * self.other if self.uses_other else found).sum()[None]


def test_updates_and_statistics_are_counted_by_rank() -> None:
    """Replicas that never exchange are as many plain trainings: ranks 1 and 2 make no update in a step each."""
    idle = {1: 0, 2: 3}
    optimizer = functools.partial(torch.optim.AdamW, lr=RATE)
    topology = topologies.build("ring", 3).every(100)
    recording = begun(*(Idle(rank, step) for rank, step in idle.items()), num_buckets=1)
    workers = make_workers(recording, topology, module=Standing(), optimizer=optimizer, bucket_cap_mb=25)
    alone = [Standing() for _ in range(3)]
    optimizers = [optimizer(module.parameters()) for module in alone]
    for step in range(7):
        batches = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        workers.module.uses_other = step % 2 == 0
        workers(batches.flatten(0, 1)).sum().backward()
        for rank in (rank for rank in range(3) if idle.get(rank) != step):
            alone[rank].uses_other = step % 2 == 0
            optimizers[rank].zero_grad()
            alone[rank](batches[rank]).sum().backward()
            optimizers[rank].step()
    workers.idle_step()  # no forward pass: what it puts back for a rank that stands still is in place
    for rank, module in enumerate(alone):
        for name, value in module.state_dict().items():
            torch.testing.assert_close(workers.replica(rank).state_dict()[name], value, rtol=0, atol=1e-12)


class Normed(Rows):
    """With float buffers."""

    def __init__(self) -> None:
        super().__init__(NUMEL)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))


ASYNCHRONOUS = {"algorithm": "asynchronous"}
REFUSED: dict[str, tuple[Recording, dict[str, Any]]] = {
    "replay is a recording of 3 ranks, but world_size is 4": (begun(), {"world_size": 4}),
    "replay is a recording of 2 ranks, but world_size is 3": (Recording([], [1, 1]), ASYNCHRONOUS | {"world_size": 3}),
    "replay names bucket 7, but the model has 2": (Recording([Average(0, 0, 7, 1, 0, 1)], [1, 1, 1]), ASYNCHRONOUS),
    "replay: a recording only covers parameters": (Recording([], [1] * 3), ASYNCHRONOUS | {"buffers": "average"}),
    "the recording does not say which ranks began": (Recording([Ended(0, 9)], [9]), {}),
    "the recording contradicts itself, .* its files are of several runs, or the run loaded a checkpoint": (
        begun(Members(1, 4, 0, [0, 1, 2], "base", 2)),
        {},
    ),
    "replay is a recording of 2 buckets, but the model has 1": (begun(), {"bucket_cap_mb": 25}),
    "is of ranks that made their steps together": (begun(), ASYNCHRONOUS),
    "replay: algorithm RelaySum.* relays along a tree": (begun(), {"algorithm": "relay_sum", "topology": "path"}),
    "replay: what codecs of compression .* only messages that are values": (begun(), {"compression": "int8"}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_repeated_is_refused(text: str) -> None:
    recording, options = REFUSED[text]
    module, optimizer = Rows(NUMEL), functools.partial(torch.optim.SGD, lr=RATE)
    module.register_buffer("count", torch.zeros(3))
    options = {"world_size": len(recording.num_steps), "topology": "ring", "bucket_cap_mb": NUMEL * 8 / 2**20} | options
    with pytest.raises(ValueError, match=text):
        VirtualWorkers(module, optimizer=optimizer, replay=recording, devices=["cpu"], **options)


def test_an_optimizer_whose_counters_are_no_steps_cannot_repeat_that_a_rank_joins() -> None:
    recording = begun(Joined(3, 1, 0), Members(0, 2, 1, [0, 1, 2, 3], "base", 2), num_ranks=4)
    workers = make_workers(recording, optimizer=functools.partial(torch.optim.NAdam, lr=RATE))
    make_step(workers)
    make_step(workers)
    with pytest.raises(ValueError, match="NAdam keeps 'mu_product', which all replicas share"):
        make_step(workers)


def test_what_a_rank_took_over_before_the_first_step() -> None:
    events = Joined(3, 0, 0), Members(0, 2, 1, [0, 1, 2, 3], "base", 2)
    workers = make_workers(begun(*events, num_ranks=4), "complete", algorithm=gossip.DiLoCo(period=4, weighted=True))
    for _ in range(2):
        workers.weigh([1, 2, 3, 4])
        values = make_step(workers)
    assert values[0].any()
    assert not values[3].any()


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_what_a_rank_takes_over_includes_buffers(buffers: Any) -> None:
    events = Joined(3, 1, 1), Members(0, 2, 1, [0, 1, 2, 3], "base", 2), Missed(2, 0, 2, 1)
    recording = begun(*events[: 2 + (buffers == "average")], num_ranks=4, num_buckets=2 + (buffers == "average"))
    workers = make_workers(recording, module=Normed(), buffers=buffers)
    (seen,) = (stack for _, stack in workers.named_buffers())
    seen.copy_(torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 3))
    make_step(workers)
    taken = seen[1].clone()
    make_step(workers)
    assert torch.equal(seen[3], taken)
    if buffers == "average":  # after round 0, in which rank 2 missed what rank 1 sent of the third bucket: 1, 1, 4/3
        torch.testing.assert_close(seen[0], torch.full((3,), 10 / 9, dtype=torch.float64))


def train_on(folder: str, record: str | None, num_steps: int) -> torch.Tensor:
    """A run of three steps, saved; or one that goes on from there, recorded."""
    with make_model(NUMEL, {"topology": "ring", "record": record}) as model:
        if record is None:
            make_steps(model, num_steps)
            gossip.save(model, folder)
        else:
            gossip.load(model, folder)
            make_steps(model, num_steps)
        model.consensus_distance()
        return flat(model.module)


def test_a_run_that_went_on_from_a_checkpoint_is_repeated_from_there(tmp_path: Path) -> None:
    folder, record = str(tmp_path / "checkpoint"), str(tmp_path / "record")
    unsupervised.results_of(train_on, folder, None, 3, world_size=2)
    expected = unsupervised.results_of(train_on, folder, record, 2, world_size=2)
    recording = Recording.load(record)
    assert recording.num_steps == [5, 5]
    with pytest.raises(GossipError, match="the next step of the run is 3, but this is step 0"):
        make_step(make_workers(recording))
    workers = make_workers(recording)
    gossip.load(workers, folder)
    for _ in range(2):
        found = make_step(workers)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-11)


def test_a_rank_that_begins_without_an_update_has_the_buffers_of_the_checkpoint(tmp_path: Path) -> None:
    saved = make_workers(begun(), module=Normed())
    next(stack for _, stack in saved.named_buffers()).fill_(2)
    make_step(saved)
    gossip.save(saved, tmp_path)
    events = [Members(0, 1, 0, [0, 1, 2], "base", 2), Idle(1, 1)]
    gossip.load(workers := make_workers(Recording(events, [9] * 3), module=Normed()), tmp_path)
    make_step(workers)
    assert all(torch.equal(stack, torch.full_like(stack, 2)) for _, stack in workers.named_buffers())


def test_a_checkpoint_of_other_ranks_is_no_beginning(tmp_path: Path) -> None:
    make_step(three := make_workers(begun()))
    gossip.save(three, tmp_path)
    four = make_workers(begun(Joined(3, 2, 0), Members(0, 3, 1, [0, 1, 2, 3], "base", 2), num_ranks=4))
    with pytest.raises(GossipError, match="the checkpoint is not one of 4 ranks with what they had in flight"):
        gossip.load(four, tmp_path)


def test_a_recording_is_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    with pytest.raises(ValueError, match="no rank has noted anything"):
        Recording.load(tmp_path)
    events: list[Event] = [Members(0, 0, 0, [0, 2], "base", 2), Missed(0, 3, 1, 2), Missed(0, 3, 1, 2, 5, True)]
    for event in events:
        recorder(event)
    Recorder(tmp_path, 2)(Joined(2, 4, 0))
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('["Missed", 0, 4')
    with pytest.warns(UserWarning, match="does not say how many steps were made"):
        assert Recording.load(tmp_path) == Recording([*events, Joined(2, 4, 0)], [6, 0, 5])
    (tmp_path / "rank2.jsonl").unlink()
    files, steps = r"has no files of ranks \[2\]; if they are on other hosts", "how many steps were made"
    with pytest.warns(UserWarning, match=steps), pytest.warns(UserWarning, match=files):
        assert Recording.load(tmp_path).num_steps == [6, 0, 0]
    with pytest.raises(ValueError, match=r"record='.*' has a recording already \(rank0.jsonl\)"):
        Recorder(tmp_path, 0)


def test_a_recording_goes_on_where_it_began_and_its_end_is_not_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder("recording", 0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder(Ended(0, 3))
    assert Recording.load(tmp_path / "recording").num_steps == [3]
    with mock.patch.object(Path, "open", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        with pytest.warns(UserWarning, match=r"rank0\.jsonl cannot be written .*; the run goes on, and cannot be"):
            recorder(Ended(0, 4))
        recorder(Ended(0, 5))
    recorder(Ended(0, 6))
    assert Recording.load(tmp_path / "recording").num_steps == [3], "what comes after a gap would mislead"


def test_a_rank_that_joins_is_averaged_after_its_first_step() -> None:
    recording = begun(Joined(3, 1, 0), Members(0, 2, 1, [0, 1, 2, 3], "base", 2), num_ranks=4)
    workers = make_workers(recording)
    for members in ([0, 1, 2], [0, 1, 2], [0, 1, 2, 3]):
        values = make_step(workers)
        with workers.averaged() as module:
            torch.testing.assert_close(flat(module), values[members].mean(0), rtol=0, atol=1e-12)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no file rank\*\.jsonl; pass the one that was record="):
        Recording.load(tmp_path)
    (tmp_path / "rank0.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"rank0\.jsonl is not a recording of a rank: '\{\"step\": 0\}'"):
        Recording.load(tmp_path)


def test_a_topology_that_cannot_serve_those_left_is_replaced_as_in_the_run() -> None:
    recording = Recording([Members(0, 0, 0, [0, 1, 2, 3], "star", 2), Members(0, 1, 1, [0, 1, 3], "star", 2)], [9] * 4)
    workers = make_workers(recording, "hypercube")
    make_step(workers)
    assert workers.topology == topologies.build("star", 3)
