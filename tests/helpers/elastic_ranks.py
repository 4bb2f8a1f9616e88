"""Ranks that go on without those that die, and that others join and leave; and the dense recursion of those that train.

Every rank's loss is half its squared distance from a target of its own. With ``shape`` and ``shard`` among the options
there are shard groups in place of ranks: as many as the shape says, of so many ranks.
"""

import functools
import hashlib
import itertools
import os
import re
import signal
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import unsupervised
from loguru import logger
from sharded_models import make_sharded
from small_runs import finish
from torch import nn
from torch.distributed.tensor import DTensor

import topologies
from gossip import GossipDataParallel, Recording, VirtualWorkers
from gossip.communication import training_store
from gossip.exchange.recording import Members, Missed, Recorder
from gossip.lab.faults.injection import Fault
from gossip.parameters.serializable_state import serialize, to_serializable

RATE = 0.1
TIMEOUT = timedelta(seconds=60)
"""Longer than a busy machine keeps a rank waiting: nobody is given up by it."""
NUM_MORE = 12
"""So many steps are made once everybody is there who was expected."""
JOINING = -1
"""Stands for ranks that join, where what is to happen is said by rank."""

Dropped = dict[tuple[int, int], list[int]]
"""By step and bucket, whose messages (by their ranks at the beginning) a rank did not mix in."""


class Pair(nn.Module):
    """Two parameters, and half the squared distance of each from its target."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(numel, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(numel, dtype=torch.float64))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((self.first - target[0]).square().sum() + (self.second - target[1]).square().sum())


def make_model(numel: int, options: Mapping[str, Any]) -> GossipDataParallel:
    """Two parameters of a bucket each, of zeros."""
    chosen: dict[str, Any] = {
        "optimizer": functools.partial(torch.optim.SGD, lr=RATE),
        "bucket_cap_mb": numel * 8 / 2**20,
        "timeout": TIMEOUT,
        "on_peer_loss": "continue",
    }
    chosen |= options
    module, (_, size) = Pair(numel), chosen.pop("shape", (0, 1))
    if size > 1:
        shape = torch.distributed.get_world_size() // size, size
        module, of_mesh = make_sharded(module, shape, chosen.pop("shard"))
        chosen |= of_mesh
        chosen["bucket_cap_mb"] *= 1 if "shard" in of_mesh else 1.001  # FSDP
        folder = chosen.pop("record", None)
    model = GossipDataParallel(module, **chosen)
    if size > 1 and folder is not None:
        model.world.record = Recorder(folder, model.world.member)  # type: ignore[attr-defined]
    return model


class Rows(Pair):
    """Of a batch of one sample."""

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return super().forward(target[0])[None]


def targets(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def flat(module: Any) -> torch.Tensor:
    """Copies of both parameters, [2, numel], or of what this rank holds of them."""
    values = [each.to_local() if isinstance(each, DTensor) else each for each in module.parameters()]
    return torch.stack([each.detach().clone() for each in values])


def digest_of(model: GossipDataParallel) -> str:
    """Of parameters and the optimizer's state."""
    state = to_serializable([flat(model.module), model.optimizer.state_dict()], "the state")
    text, values = serialize(state)
    return hashlib.sha256(text.encode() + values.numpy().tobytes()).hexdigest()


def joins() -> bool:
    """Whether this process joins the training of others."""
    return training_store.joined() is not None


def steps_until(
    model: GossipDataParallel, is_complete: Callable[[], bool], num_more: int = NUM_MORE
) -> Iterator[int | None]:
    """Yield before every step, until ``is_complete`` and some steps more; their number in the end, once it is known."""
    last = None
    while last is None or model.step < last:
        if last is None and is_complete():
            last = model.step + num_more
        yield last


def without(members: tuple[int, ...], leaves: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(member for member in members if member not in leaves)


def train_until(model: GossipDataParallel, is_complete: Callable[[], bool], num_more: int = NUM_MORE) -> None:
    """Make these steps."""
    for _ in steps_until(model, is_complete, num_more):
        model(targets(model.world.worker, model.module.first.numel())).backward()


def make_steps(model: GossipDataParallel, num_steps: int) -> None:
    for _ in range(num_steps):
        model(targets(model.world.worker, model.module.first.numel())).backward()


# ---------------------------------------------------------------------- what ranks tell


class Stay(NamedTuple):
    """What a rank tells, which joined at ``first_step`` with the state that ``came`` from a member, of a step.

    ``values`` are its parameters before each step, after the last one, and after the global average; ``digests`` those
    of parameters and the optimizer's state, up to the last step; ``generations`` first steps and members.
    """

    member: int
    first_step: int
    values: list[torch.Tensor]
    digests: list[str]
    generations: list[tuple[int, tuple[int, ...]]]
    lost: dict[int, str]
    came: tuple[int, int] | None

    @property
    def has_left(self) -> bool:
        """Whether it left half-way, and has no global average."""
        return len(self.digests) == len(self.values)


def dropped_of(recording: Recording) -> dict[int, Dropped]:
    """By member, step and bucket, whose messages it did not mix in."""
    found: defaultdict[int, Dropped] = defaultdict(dict)
    for event in recording.events:
        if isinstance(event, Missed) and event.entered < 0:
            found[event.rank].setdefault((event.step, event.bucket), []).append(event.source)
    return found


def stay(
    folder: str,
    numel: int,
    until: tuple[int, ...] | int,
    ends: Mapping[int, Fault],
    leaves: tuple[int, ...],
    options: Mapping[str, Any],
    is_told: bool = False,
) -> Stay:
    """Make so many steps; or train until the members have been these, those that leave have left, and some steps more.

    ``ends`` says by rank where it ends. With ``is_told`` it is SIGTERM that makes those leave that do.
    With ``shares_memory=False`` among the options all messages go over sockets. The recording is in the folder.
    """
    from fault_places import injected  # it loads what a test shows not to be loaded otherwise

    from gossip.elastic import elastic_world

    number = JOINING if joins() else torch.distributed.get_rank()
    came: list[tuple[int, int]] = []

    def listen(message: Any) -> None:
        if found := re.search(r"joins at step \d+, with what rank (\d+) had at step (\d+)", str(message)):
            came.append((int(found[1]), int(found[2])))

    logger.add(listen, level="INFO")
    options = dict(options)
    shares_memory = options.pop("shares_memory", True)
    values: list[torch.Tensor] = []
    digests: list[str] = []
    generations: list[tuple[int, tuple[int, ...]]] = []
    with (
        mock.patch.object(elastic_world, "can_share", return_value=shares_memory),
        injected([ends[number]] if number in ends else []),
    ):
        model = make_model(numel, options | {"record": folder})
        member, first = model.world.member, model.step
        target = targets(model.world.worker, numel)

        def note() -> None:
            if not generations or model.members != generations[-1][1]:
                generations.append((model.step, model.members))
            values.append(flat(model.module))
            digests.append(digest_of(model))

        def told() -> Stay:
            lost = dict(model.world.mesh.lost)
            return Stay(member, first, values, digests, generations, lost, came[0] if came else None)

        num_steps = until if isinstance(until, int) else NUM_MORE

        def is_complete() -> bool:
            if isinstance(until, int):
                return True
            expected = until if model.world.worker in leaves else without(until, leaves)
            have_been = [model.members, *(members for _, members in generations)]
            return model.members == expected and set(until) <= set().union(*have_been)

        for last in steps_until(model, is_complete, num_steps):
            note()
            if last is not None and model.world.worker in leaves and model.step == last - num_steps // 2:
                if is_told:
                    os.kill(os.getpid(), signal.SIGTERM)
                    with pytest.raises(SystemExit, match="143"):
                        model(target)
                else:
                    model.leave()
                return told()
            model(target).backward()
            finish(model)
        note()
        model.global_avg()
        values.append(flat(model.module))
        if model.members != generations[-1][1]:
            generations.append((model.step + 1, model.members))
        found = told()
        model.close()
    return found


# ---------------------------------------------------------------------- what becomes of them


REPEATED = ("algorithm", "buffers", "clip_grad_norm", "compression", "optimizer", "topology")


def make_workers(recording: Recording, numel: int, module: nn.Module | None = None, **options: Any) -> VirtualWorkers:
    """Of the model of :func:`make_model`, or of another module; they repeat the recording."""
    chosen = {"optimizer": functools.partial(torch.optim.SGD, lr=RATE), "bucket_cap_mb": numel * 8 / 2**20} | options
    size = len(recording.num_steps)
    return VirtualWorkers(
        module or Rows(numel), size, replay=recording, loss_reduction="sum", devices=["cpu"], **chosen
    )


def values_of(workers: VirtualWorkers) -> torch.Tensor:
    """Of all replicas, [n, 2, numel]."""
    return torch.stack([stack.detach() for stack in workers.parameters()], 1)


def replay(
    recording: Recording,
    numel: int,
    num_steps: int,
    weigh: Callable[[int], int] | None = None,
    returned: Mapping[int, int] | None = None,
    **options: Any,
) -> Iterator[tuple[VirtualWorkers, torch.Tensor]]:
    """Virtual workers before each step and after the last one, and the values of all replicas, [n, 2, numel].

    ``returned`` says by number which ranks had been there before, and with which number.
    """
    workers = make_workers(recording, numel, **{name: options[name] for name in REPEATED if name in options})
    ranks = range(workers.world_size)
    samples = torch.stack([targets((returned or {}).get(rank, rank), numel) for rank in ranks])
    for step in range(num_steps + 1):
        yield workers, values_of(workers)
        if step < num_steps:
            if weigh is not None:
                workers.weigh([weigh(rank) for rank in ranks])
            workers(samples).sum().backward()


def assert_repeated(recording: Recording, stories: Mapping[int, Mapping[int, Any]], numel: int, **options: Any) -> None:
    """Virtual workers that replay the recording have the values that each member tells of each step."""
    num_steps = max(map(max, stories.values()))
    begun: dict[int, int] = {}
    for event in recording.events:
        if isinstance(event, Members):
            begun[event.rank] = min(event.step, begun.get(event.rank, event.step))
    for step, (_, values) in enumerate(replay(recording, numel, num_steps, **options)):
        for member, story in stories.items():
            if step in story and step >= begun[member]:
                where = f"replay of rank {member}, step {step}"
                np.testing.assert_allclose(values[member], story[step], atol=1e-11, rtol=0, err_msg=where)


class Outcome(NamedTuple):
    """By member, what those tell who have not ended, and whose messages each did not mix in.

    Members are ranks; those of ``stays[...].generations`` are shard groups of ``size`` ranks.
    """

    stays: dict[int, Stay]
    dropped: dict[int, Dropped]
    size: int = 1
    holds_shards: bool = True
    recording: Recording = Recording([], [])

    @property
    def numel(self) -> int:
        """The number of values of a parameter."""
        return sum(rows.stop - rows.start for rows in self.rows)

    @property
    def rows(self) -> list[slice]:
        """Of a parameter, by the place of a rank in its group."""
        held = self.longest.values[0].shape[1]
        length = held if self.holds_shards else held // self.size
        return [slice(place * length, (place + 1) * length) for place in range(self.size)]

    @property
    def longest(self) -> Stay:
        """What the one tells that was there for longest."""
        return max(self.stays.values(), key=lambda one: len(one.values))


def run(
    until: tuple[int, ...] | int,
    *,
    world_size: int = 4,
    numel: int = 64,
    num_joining: int = 0,
    ends: Mapping[int, Fault] | None = None,
    leaves: tuple[int, ...] = (),
    doomed: Fault | None = None,
    is_told: bool = False,
    **options: Any,
) -> Outcome:
    """Train, with joining ranks; with ``doomed`` one more comes first, and ends there."""
    faults = dict(ends or {})
    _, size = options.get("shape", (world_size, 1))
    ended = {rank for fault in faults for rank in range(fault - fault % size, fault - fault % size + size)}
    frozen = {rank for rank, fault in faults.items() if fault.kind == "freeze"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, numel, until, faults, leaves, options, is_told)
        with unsupervised.started(stay, *arguments, world_size=world_size) as ranks:
            if doomed is not None:
                ranks.join(stay, folder, numel, until, {JOINING: doomed}, leaves, options)
                ranks.wait_until_stopped(world_size)
            for _ in range(num_joining):
                ranks.join(stay, *arguments, group_size=size)
            results = ranks.results(silent=frozen)
        assert [rank for rank, one in enumerate(results[:world_size]) if one is None] == sorted(ended)
        told = [one for one in results if one is not None]
        groups = {group for one in told for _, generation in one.generations for group in generation}
        members = [member for group in groups for member in range(group * size, group * size + size)]
        with warnings.catch_warnings(action="ignore"):  # ranks that end in the construction have no file
            recording = Recording.load(folder)
    found = dropped_of(recording)
    dropped = {member: found[member] for member in members}
    stays = {one.member: one for one in told}
    if size == 1 and options.get("compression") in (None, "bf16"):
        stories = {
            member: dict(enumerate(one.values if one.has_left else one.values[:-2], one.first_step))
            for member, one in stays.items()
        }
        assert_repeated(recording, stories, numel, **options)
    return Outcome(stays, dropped, size, options.get("shard", "fsdp") == "fsdp", recording)


def dense(outcome: Outcome, topology: str) -> list[dict[int, np.ndarray]]:
    """By step, the members' values in the recursion along each generation's topology, without what was dropped."""
    size, longest = outcome.size, outcome.longest
    stays = {member // size: one for member, one in outcome.stays.items() if member % size == 0}
    last = longest.first_step + len(longest.values) - 2
    numel = outcome.numel
    quits = {
        member: one.first_step + len(one.values) - 1
        for member, one in stays.items()
        if member not in longest.generations[-1][1]
    }
    goal = {member // size: targets(member // size, numel).numpy() for member in outcome.dropped}
    x = {member: np.zeros((2, numel)) for member in longest.generations[0][1]}
    differences = dict.fromkeys(x, np.zeros((2, numel)))
    by_step: list[dict[int, np.ndarray]] = []
    for step in range(last + 1):
        members = next(members for first, members in reversed(longest.generations) if first <= step)
        if any(first == step for first, _ in longest.generations[1:]):
            x = {member: values + differences[member] for member, values in x.items()}
            for member in set(members) - x.keys():
                source, given_at = stays[member].came or (0, 0)
                x[member] = by_step[given_at][source // size]
            differences = dict.fromkeys(x, np.zeros((2, numel)))
        x = {member: x[member] for member in members}
        by_step.append(x)
        matrix = topologies.build(topology, len(members)).round(step).matrix()
        after, mixed = {}, {}
        for member in members:
            updates = step < quits.get(member, last + 1)
            after[member] = x[member] + differences[member] - RATE * updates * (x[member] - goal[member])
        for i, member in enumerate(members):
            mixed[member] = np.zeros((2, numel))
            for j, other in enumerate(members):
                for parameter, (place, rows) in itertools.product(range(2), enumerate(outcome.rows)):
                    # Buckets are in the reversed order of the parameters.
                    dropped = outcome.dropped[member * size + place].get((step, 1 - parameter), ())
                    if other * size + place not in dropped:
                        difference = after[other][parameter, rows] - after[member][parameter, rows]
                        mixed[member][parameter, rows] += matrix[i, j] * difference
        x, differences = after, mixed
    return by_step


def assert_follow_the_recursion(outcome: Outcome, topology: str) -> None:
    assert_agree(outcome)
    expected = dense(outcome, topology)
    for member, one in outcome.stays.items():
        group, place = divmod(member, outcome.size)
        for step, values in enumerate(one.values if one.has_left else one.values[:-1], one.first_step):
            wanted = expected[step][group]
            held = wanted if values.shape == wanted.shape else wanted[:, outcome.rows[place]]
            np.testing.assert_allclose(values, held, atol=1e-11, err_msg=f"rank {member}, step {step}")


def assert_agree(outcome: Outcome) -> None:
    """All have seen the same generations since they came, took what one had exactly, and end with the same mean."""
    stays, longest = outcome.stays, outcome.longest
    size = outcome.size
    assert set(longest.generations[-1][1]) == {member // size for member, one in stays.items() if not one.has_left}
    left = [stays[group * size + place] for group in longest.generations[-1][1] for place in range(size)]
    for one in left:
        seen = [members for first, members in longest.generations if first >= one.first_step]
        assert [members for _, members in one.generations[-len(seen) :]] == seen
        if one.came is not None:
            source, step = one.came
            assert one.digests[0] == stays[source].digests[step - stays[source].first_step]
    for place in range(size):
        mean = np.mean([one.values[-2] for one in left[place::size]], axis=0)
        for one in left[place::size]:
            np.testing.assert_allclose(one.values[-1], mean, atol=1e-12)
